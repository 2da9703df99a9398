"""Processes of a run on this machine.

| file | subject |
| --- | --- |
| `local` | a whole training: memory, actors, learners and the first learner's loop |
| `actors`, `learners`, `evaluator` | their processes: main functions, start, restart and end |
| `processes` | fork server, signals and ends of processes |
"""
