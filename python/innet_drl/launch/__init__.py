"""Processes of a run on this machine.

| file | subject |
| --- | --- |
| `local` | a whole training: checks before it, and the run's folder |
| `parallel` | memory, actors, learners and the first learner's loop |
| `actors`, `learners`, `evaluator` | their processes: main functions, start, restart and end |
| `aggregator` | checks of the server that averages gradients |
| `processes` | start, failure and end of a process |
| `fork_server` | the process that they are forked from |
"""
