"""`innet-drl bench`: evaluations of papers, repeated with the package alone, and their baselines.

| files | subject |
| --- | --- |
| `paper` | evaluation of Furukawa and Matsutani (2022): the command |
| `settings`, `scene` | its systems, sizes and recorded frames |
| `systems`, `roles` | its connections of actors and learner; their processes and clocks |
| `figures` | its tables and picture |
| `gradients`, `reward`, `links` | evaluation of iSwitch (Li et al., ISCA 2019): sums, a training, emulated links |
| `parameter_server`, `losses` | its baseline, and losses of datagrams |
| `relay` | an emulated link for connections |
| `services`, `crew`, `results`, `flags` | servers, processes, the results' file and flags of both evaluations |
| `redis_memory`, `redis_store`, `redis_client`, `messages` | the baseline: a memory whose experience a Redis relays |
| `sweep` | `innet-drl analyze`: how many actors, threads and environments a machine needs |
"""
