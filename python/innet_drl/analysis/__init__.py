"""Analyses of runs and machines: `innet-drl report`, `innet-drl analyze`.

| files | subject |
| --- | --- |
| `report`, `report.html` | the function of `innet-drl report`, from runs to one HTML file, and its template |
| `recorded_run` | a run as its folder records it |
| `charts`, `tables` | charts and tables of one or several runs |
| `breakdown` | the time of each process by activity, as a table |
| `pictures` | files and SVG elements by matplotlib |
| `flags` | flags of `innet-drl analyze` |
| `sweep` | how many actors, threads and environments a machine needs: `analyze ratio`, `what-if` |
"""
