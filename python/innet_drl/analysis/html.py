"""The page of a report: one HTML file without scripts and outside assets, light and dark, for screens and paper."""

from __future__ import annotations

import jinja2
from markupsafe import Markup

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f6f3; --card: #ffffff; --ink: #1b1b1a; --ink-2: #5b5a55; --grid: #d9d8d2; --bar: #cfe0f6; --bad: #b3261e;
  --s0: #2a78d6; --s1: #e2601f; --s2: #17936a; --s3: #b87900;
  --s4: #cf5186; --s5: #3f7d20; --s6: #5a48b5; --s7: #d03b3b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #161615; --card: #201f1e; --ink: #f1f0ec; --ink-2: #b3b1a9; --grid: #3d3c39; --bar: #24446c; --bad: #ff8a80;
  --s0: #5598e8; --s1: #ee7d45; --s2: #2fb98a; --s3: #d79b23;
  --s4: #e57ba8; --s5: #78b654; --s6: #a096f0; --s7: #ee7070; } }
@media print { :root { color-scheme: light;
  --page: #fff; --card: #fff; --ink: #000; --ink-2: #444; --grid: #ccc; --bar: #dde8f7; --bad: #b3261e;
  --s0: #2a78d6; --s1: #e2601f; --s2: #17936a; --s3: #b87900;
  --s4: #cf5186; --s5: #3f7d20; --s6: #5a48b5; --s7: #d03b3b; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  @page { margin: 12mm; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 86rem; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: .2rem 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 1.6rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1rem 0 .4rem; } p { margin: .3rem 0; } .quiet { color: var(--ink-2); }
.bad { color: var(--bad); } .note { border-left: 3px solid var(--bad); padding-left: .6rem; overflow-wrap: anywhere; }
.keys { display: flex; flex-wrap: wrap; gap: .1rem .9rem; } .key { white-space: nowrap; }
.key i { display: inline-block; width: 1.1rem; margin-right: .35rem; vertical-align: middle; border-top: 3px solid; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: .8rem; }
figure { margin: 0; padding: .6rem .7rem .3rem; background: var(--card); border: 1px solid var(--grid);
  border-radius: 6px; break-inside: avoid; min-width: 0; }
figcaption .keys { font-size: .85em; color: var(--ink-2); } figcaption b { margin-right: .5rem; }
figcaption { overflow-wrap: anywhere; } figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: system-ui, sans-serif; }
.empty { color: var(--ink-2); padding: 2.5rem 0; text-align: center; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--grid); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem; border-top: 1px solid var(--grid); vertical-align: top; }
tr:first-child > * { border-top: 0; } td { overflow-wrap: anywhere; min-width: 6rem; }
th[scope=row] { font-weight: 400; color: var(--ink-2); position: sticky; left: 0; background: var(--card); }
td.bar { background: linear-gradient(to right, var(--bar) var(--share), transparent 0); }
summary { cursor: pointer; padding: .3rem 0; }
.videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); gap: .8rem; }
video { width: 100%; max-height: 30rem; display: block; background: #000; }
@media print { body { padding: 0; max-width: none; font-size: 10px; } .charts { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; } tr { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""

_TEMPLATE = """\
{%- macro table(rows, runs) -%}
<div class="wide"><table>
{%- if runs|length > 1 %}
<tr><th></th>{% for run in runs %}<th scope="col">{{ run.name }}</th>{% endfor %}</tr>
{%- endif %}
{%- for row in rows %}
<tr><th scope="row">{{ row.name }}</th>
{%- for cell in row.cells -%}
{% if row.shares %}<td class="bar" style="--share: {{ "%.1f"|format(100 * row.shares[loop.index0]) }}%">
{%- else %}<td>{% endif %}{{ cell }}</td>
{%- endfor %}</tr>
{%- endfor %}
</table></div>
{%- endmacro -%}
{%- macro key(curve) -%}
<span class="key"><i style="color: {{ curve.colour }}; opacity: {{ curve.opacity }};
  border-top-style: {{ curve.dash }}"></i>
{{- curve.label }}</span>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="innet-drl {{ release }}">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="quiet">innet-drl {{ release }}, {{ date }}</p>
{%- if runs|length > 1 %}
<p class="keys">
{%- for curve in legend %}{{ key(curve) }}{% endfor %}</p>
{%- endif %}
{%- for run in runs %}
{%- if not run.is_complete %}
<p class="note"><b>{{ run.name }}</b>: <span class="bad">{{ run.state }}</span></p>
{%- endif %}
{%- for sign in run.signs %}
<p class="note"><b>{{ run.name }}</b>: {{ sign }}</p>
{%- endfor %}
{%- for note in run.notes %}
<p class="note"><b>{{ run.name }}</b>: {{ note }}</p>
{%- endfor %}
{%- endfor %}
<h2>Results</h2>
{{ table(results, runs) }}
{%- for game in games %}
<h2>{% if games|length > 1 %}{{ game.environment }}{% else %}Curves{% endif %}</h2>
{%- if not game.charts %}
<p class="quiet">No line of metrics has been written yet.</p>
{%- endif %}
<div class="charts">
{%- for chart, svg in game.charts %}
<figure>
<figcaption><b>{{ chart.title }}</b><span class="quiet">{{ chart.unit }}</span>
{%- if chart.drawn|length > 1 or game.runs|length == 1 %}
<div class="keys">
{%- for curve in keys(chart) %}{{ key(curve) }}{% endfor %}</div>
{%- endif %}</figcaption>
{% if svg %}{{ svg }}{% else %}<p class="empty">no values</p>{% endif %}
</figure>
{%- endfor %}
</div>
{%- endfor %}
{%- if learner_times or actor_times %}
<h2>Where the time went</h2>
<p class="quiet">Shares of the whole run. "wait for a batch" is the learner's wait for the actors; "wait for the memory"
of the actors (in runs of earlier releases "write") has their wait for the learner, by the replay ratio. Each process:
<code>innet-drl analyze breakdown</code>.</p>
{%- if learner_times %}
<h3>Learner</h3>
{{ table(learner_times, runs) }}
{%- endif %}
{%- if actor_times %}
<h3>Actors</h3>
{{ table(actor_times, runs) }}
{%- endif %}
{%- endif %}
{%- if videos %}
<h2>{% if videos|length == 1 %}Video{% else %}Videos{% endif %}</h2>
<div class="videos">
{%- for video in videos %}
<figure><figcaption><b>{{ video.run }}</b><span class="quiet">{{ video.name }}</span>
{%- if video.linked %}
<p class="quiet">{{ video.linked }}: <a href="{{ video.source }}">{{ video.name }}</a></p>
{%- endif %}</figcaption>
<video controls muted playsinline preload="metadata" src="{{ video.source }}"></video></figure>
{%- endfor %}
</div>
{%- endif %}
<h2>Settings</h2>
{%- if runs|length > 1 %}
{%- if differing %}
<p class="quiet">The runs differ in:</p>
{{ table(differing, runs) }}
{%- else %}
<p>The runs have equal settings.</p>
{%- endif %}
{%- else %}
<p class="quiet">Other than the defaults of <code>innet_drl.train.Config</code>:</p>
{{ table(differing, runs) }}
{%- endif %}
<details><summary>All settings</summary>
{{ table(settings, runs) }}
</details>
{%- if machines %}
<h2>Machine and versions</h2>
{{ table(machines, runs) }}
{%- endif %}
</body>
</html>
"""


def render(**values: object) -> str:
    """Returns the page; all text in `values` is escaped, except for `markupsafe.Markup`."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(_TEMPLATE).render(style=Markup(_STYLE), **values) + "\n"
