"""Processes of a run.

| file | subject |
| --- | --- |
| `local` | a session of training: checks before it, and the run's folder |
| `parallel` | memory, actors, learners and the first learner's loop |
| `launcher` | the interface of places where processes are started, and this machine as one |
| `ray` | a Ray cluster as another |
| `actors`, `learners`, `evaluator` | processes that the learner starts: main functions, start, restart and end |
| `joined_actors`, `joining` | actors that join by themselves: the learner's side, and the actor's process |
| `playing` | the loop of an actor's process |
| `processes` | start, failure and end of a process |
| `fork_server` | the process that they are forked from |
"""
