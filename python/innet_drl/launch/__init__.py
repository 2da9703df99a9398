"""Processes of a run.

| file | subject |
| --- | --- |
| `local` | a session of training: checks before it, and the run's folder |
| `parallel` | memory, actors, learners and the first learner's loop |
| `launcher` | the interface that starts processes, and its implementation for this machine |
| `ray` | its implementation for a Ray cluster |
| `actors`, `learners`, `evaluator` | processes that the learner starts: main functions, start, restart and end |
| `joining` | the command `innet-drl actor`: finds a run, and joins it again after changes |
| `playing` | the loop of every actor's process |
| `processes` | start, failure and end of a process |
"""
