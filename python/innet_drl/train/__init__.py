"""Training with prioritized replay (Ape-X DQN). Needs the extra `train`.

| files | subject |
| --- | --- |
| `config`, `presets`, `flags` | settings, settings to start from, the command line's flags |
| `environments` | vector environments of Gymnasium and Atari |
| `networks`, `losses` | Q-networks; the loss and TD errors of a batch |
| `exploration`, `actor` | epsilon-greedy exploration; playing and writing steps |
| `memory` | the interface of the replay memory: embedded, on a server, or another package's |
| `learner`, `numerics`, `targets`, `data_parallel` | updates; measured arithmetic; targets ahead; several learners |
| `trainer`, `serial`, `journal` | one session of a run; the loop in one process; its repeatable memory |
| `evaluation`, `video` | games of the trained agent |
| `run_folder`, `checkpoints` | files of a run |
| `metrics`, `metrics_files`, `page` | metrics, their files, and the page in the terminal |
| `errors`, `machine` | errors of training; cores of the machine |

`innet_drl.launch` runs actors and learners as processes.
"""
