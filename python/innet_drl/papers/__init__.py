"""`innet-drl bench`: evaluations of papers, repeated with this package, and their baselines.

| files | subject |
| --- | --- |
| `paper` | evaluation of Furukawa and Matsutani (2022): the command |
| `settings`, `scene` | its systems, sizes and recorded frames |
| `systems`, `roles` | its connections of actors and learner; their processes and clocks |
| `figures` | its tables and picture |
| `gradients`, `reward`, `links` | evaluation of iSwitch (Li et al., ISCA 2019): all-reduce, training, emulated links |
| `parameter_server`, `losses` | its baseline, and datagram loss |
| `relay` | an emulated link for connections |
| `services`, `crew`, `results`, `flags` | servers, processes, the results' file and flags of both evaluations |
| `redis_memory`, `redis_store`, `redis_client`, `messages` | the baseline: a memory with Redis as the transport |
| `sweep` | `innet-drl analyze`: how many actors, threads and environments a machine needs |
"""
