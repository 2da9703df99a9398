"""Looking at runs: `innet-drl report`, and the SVG files that it shares with the benchmarks.

- `report.py`: the command's function, from runs to one HTML file
- `recorded_run.py`: a run as its folder records it
- `charts.py`: the charts of one or several runs; `drawing.py` draws them as SVG
- `tables.py`: results, settings, machines, shares of time; `html.py` is the page
- `pictures.py`: small SVG files from matplotlib
"""
