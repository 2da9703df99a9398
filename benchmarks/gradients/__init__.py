"""The evaluation of iSwitch (Li et al., ISCA 2019), repeated: gradient all-reduce by innet-drl and other systems.

| file | subject |
| --- | --- |
| `evaluation` | the command |
| `workers` | a worker's process |
| `training` | A2C on CartPole with each system |
| `figures` | tables and picture |
| `parameter_server` | a baseline |
| `links`, `losses` | links with a rate in network namespaces; datagram loss |
"""
