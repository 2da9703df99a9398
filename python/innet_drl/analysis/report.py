"""`innet-drl report`: one HTML file with the results of one or several runs."""

from __future__ import annotations

import base64
import datetime
import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

import innet_drl as innet
from innet_drl.analysis import tables
from innet_drl.analysis.charts import charts
from innet_drl.analysis.recorded_run import RecordedRun, read_run, reading
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import replacing
from innet_drl.train.observe.display import Progress, silent
from innet_drl.train.run_folder import RunFolder

EMBEDDED_BYTES = 4 * 2**20
"""Largest size of an embedded video, which base64 makes a third larger. Larger videos are linked."""


@dataclass(frozen=True)
class Report:
    """A report that was written."""

    path: Path
    bytes: int
    runs: tuple[RecordedRun, ...]
    notes: tuple[str, ...]
    """Linked videos."""


@dataclass(frozen=True)
class _Video:
    run: str
    name: str
    source: str
    linked: str
    """Reason for not embedding the video; empty if it is embedded."""


def write_report(runs: Sequence[Path], out: Path | None = None, *, progress: Progress = silent) -> Report:
    """Writes a report of runs, of one or several environments.

    Args:
        runs: Folders of the runs; one that is named twice is shown once.
        out: The file; by default `report.html` in the folder of one run, and in the current directory for several.
        progress: Shows how far it is.

    Raises:
        RunFolderError: A folder has no run or cannot be read, or the file cannot be written.
        ConfigurationError: No run is named, the file's name does not end in `.html`, or the settings of a run are
            damaged.
    """
    if not runs:
        raise ConfigurationError("innet-drl report shows runs: name their folders, runs/...")
    folders = list({run.resolve(): run for run in runs}.values())
    path = out or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if path.suffix not in (".html", ".htm"):
        raise ConfigurationError(f"--out {path}: a report is an HTML file, name it {path.with_suffix('.html').name}")
    for run in folders:
        RunFolder.open(run)
    # Entered before the work, which would be lost if the file cannot be written.
    with writing(str(path), "choose another file with --out"), replacing(path) as file:
        names = _names(folders)
        read = [read_run(run, name) for run, name in zip(folders, names, strict=True)]
        videos = [_video(run, run.video, path) for run in read if run.video is not None]
        file.write_text(_page(read, videos, progress))
    notes = [f"{video.name} of {video.run}: {video.linked}" for video in videos if video.linked]
    return Report(path, path.stat().st_size, tuple(read), tuple(notes))


def _page(runs: Sequence[RecordedRun], videos: Sequence[_Video], progress: Progress) -> str:
    environments: dict[str, list[RecordedRun]] = {}
    for run in runs:
        environments.setdefault(run.config.environment_name, []).append(run)
    drawn = {
        name: charts(played, progress) if any(run.lines for run in played) else []
        for name, played in environments.items()
    }
    differing, settings = tables.settings(runs)
    # Text is escaped, except for `Markup`.
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs of {', '.join(environments)}",
        release=innet.__version__,
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        runs=runs,
        charts=drawn,
        results=tables.results(runs),
        learner_times=tables.times(runs, "learner_time"),
        actor_times=tables.times(runs, "actor_time"),
        videos=videos,
        differing=differing,
        settings=settings,
        machines=tables.machines(runs),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, or their paths if names repeat."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _video(run: RecordedRun, video: Path, out: Path) -> _Video:
    with reading(video):
        size = video.stat().st_size
        if size <= EMBEDDED_BYTES:
            data = base64.b64encode(video.read_bytes()).decode()
            return _Video(run.name, video.name, f"data:video/mp4;base64,{data}", "")
    relative = os.path.relpath(video.resolve(), out.resolve().parent)
    linked = f"{size / 2**20:.1f} MiB, linked and not part of this file: keep both where they are"
    return _Video(run.name, video.name, urllib.parse.quote(relative), linked)
