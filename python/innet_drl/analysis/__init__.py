"""Reports on runs: `innet-drl report`, `innet-drl analyze breakdown`, and SVG files, also for the benchmarks.

- `report.py`: the command's function, from runs to one HTML file
- `recorded_run.py`: a run as its folder records it
- `charts.py`: the charts of one or several runs; `drawing.py` draws them as SVG
- `tables.py`: results, settings, machines, shares of time; `report.html` is the template of the page
- `breakdown.py`: the time of each process by activity, with its flags in `flags.py`; `bars.py` reads it,
  `bar_picture.py` draws it, `trace.py` writes a trace
- `pictures.py`: files and SVG elements from matplotlib
"""
