"""How many actors, hardware threads and environments a machine needs, measured and predicted.

| files | subject |
| --- | --- |
| `ratio`, `point` | the sweep, and one of its points, a short run in processes of its own |
| `sweep_file` | its machine, and its file, from which an interrupted sweep continues |
| `knee` | the knee of a curve, and the recommended point |
| `model`, `what_if` | service times and queues, fitted to the points; the prediction for other machines |
| `output` | results of a sweep as text and picture |
"""
