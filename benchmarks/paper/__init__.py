"""The evaluation of Furukawa and Matsutani (2022), repeated: `docs/explanation/paper.md` defines the figures.

| file | subject |
| --- | --- |
| `evaluation` | the command |
| `cases` | flags, systems, formats, sizes and cases |
| `systems`, `roles` | connections of actors and learner in each system; their processes and clocks |
| `figures` | tables and picture |
"""
