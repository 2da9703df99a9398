"""`innet-drl report`: one HTML file from runs that ended, are training, were killed, or are damaged."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter
from training import BothHavePlayed, lines, small

from benchmarks.learning import learning
from innet_drl import train
from innet_drl.analysis import report
from innet_drl.analysis.charts import Curve, draw
from innet_drl.analysis.report import write_report
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train.errors import ConfigurationError, RunFolderError
from innet_drl.train.observe.metrics import PANELS, Panel, values_of
from innet_drl.train.run_folder import RunFolder


class Page(html.parser.HTMLParser):
    """Parts of a report."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.rows: dict[str, list[str]] = {}
        """Cells of the last row of each name."""
        self.headings: list[str] = []
        self.charts: dict[str, int] = {}
        """Number of paths of each chart, by its title."""
        self._row: list[str] | None = None
        self._open: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag == "tr":
            self._row = []
        if tag in ("td", "th") and self._row is not None:
            self._row.append("")
        if tag == "path" and self.charts:
            self.charts[list(self.charts)[-1]] += 1
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr" and self._row:
            self.rows[self._row[0]] = self._row[1:]
            self._row = None
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._row:
            self._row[-1] += data
        elif self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        elif self._open[-2:] == ["figcaption", "b"]:
            self.charts[data] = 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two real runs, of several actors and of one, with a video."""
    folder = tmp_path_factory.mktemp("runs")
    config = small(environment="brought:Drawn", video=True, steps=600, evaluation_period=40)
    apart = dataclasses.replace(config, actors=2, environments=2, steps=1_000_000)
    start.train(apart, folder / "first", callbacks=[BothHavePlayed(evaluated=True)])
    start.train(dataclasses.replace(config, serial=True, seed=7, learning_rate=1e-3), folder / "second")
    return [folder / "first", folder / "second"]


@pytest.fixture
def copied(runs: list[Path], tmp_path: Path) -> Path:
    """A run to damage."""
    return Path(shutil.copytree(runs[1], tmp_path / "run"))


def test_the_report_of_a_run_has_everything_in_one_file(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.html"
    assert main(["report", str(runs[0]), "--out", str(out)]) == 0
    assert re.search(rf"report of 1 run, 0\.\d MiB: {re.escape(str(out))}", capsys.readouterr().out)
    page = Page(out)
    assert "script" not in page.tags
    assert "link" not in page.tags
    # The video, and within a chart its own parts.
    assert {link.partition(",")[0].partition("#")[0] for link in page.links} == {"data:video/mp4;base64", ""}
    assert "http" not in page.source.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        'xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    last = lines(runs[0])[-1]
    assert page.rows["state"] == ["finished"]
    assert page.rows["agent steps"] == [f"{last['agent_steps']:,}"]
    assert page.rows["replay ratio: target"] == ["8"]
    assert page.rows["learner_threads"] == ["1"]
    assert page.rows["numpy"] == [np.__version__]
    for title in ("Score", "Score of each actor", "Q-loss", "Memory", "Replay ratio", "Throughput of each actor"):
        assert page.charts[title] > 0, title
    for title in ("The learner waits for samples", "The actors wait for the learner"):
        assert page.charts[title] > 0, title
    assert {"actor 0", "actor 1"} <= {word.rpartition(" ")[0] for word in page.source.replace("<", ">").split(">")}
    for role, metric in (("Learner", "learner_time"), ("Actors", "actor_time")):
        rows = page.source.split(f"<h3>{role}</h3>")[1].split("</table>")[0]
        shares = [float(share) for share in re.findall(r"--share: ([\d.]+)%", rows)]
        assert len(shares) == len({name for line in lines(runs[0]) for name in values_of(line, metric)})
        assert sum(shares) == pytest.approx(100, abs=1)


def test_several_runs_differ_in_their_settings(runs: list[Path], tmp_path: Path) -> None:
    written = write_report([*runs, runs[0]], tmp_path / "both.html")
    assert len(written.runs) == 2
    page = Page(written.path)
    assert page.headings[0] == "2 runs of brought:Drawn"
    before_all = page.source.split("The runs differ in:")[1].split("<details>")[0]
    differing = {name for name in page.rows if name and f">{name}</th>" in before_all}
    assert differing == {"seed", "learning_rate", "serial", "actors", "environments", "steps"}
    assert page.rows["seed"] == ["0", "7"]
    assert {"Score of each actor: first", "Score of each actor: second", "Score: evaluation"} <= page.charts.keys()
    assert page.source.count("data:video/mp4") == 2


def test_runs_with_an_underscore_are_in_the_legend(runs: list[Path], tmp_path: Path) -> None:
    folders = [Path(shutil.copytree(run, tmp_path / f"_{run.name}")) for run in runs]
    page = Page(write_report(folders, tmp_path / "both.html").path)
    assert all(page.source.count(f"_{run.name}") > 20 for run in runs)


def test_a_logarithmic_chart_of_zeros_is_drawn() -> None:
    assert draw(Panel("unit", {}, is_logarithmic=True), [Curve("label", np.arange(3.0), np.zeros(3), {})]) is not None


def test_runs_of_other_games_have_charts_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    start.train(small(serial=True, steps=300), tmp_path / "other")
    page = Page(write_report([runs[1], tmp_path / "other"], tmp_path / "games.html").path)
    assert [each for each in page.headings if each in ("brought:Drawn", "CartPole-v1")] == [
        "brought:Drawn",
        "CartPole-v1",
    ]
    assert page.headings[0] == "2 runs of brought:Drawn, CartPole-v1"


def test_lines_that_were_cut_are_left_out(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics, sessions = copied / "metrics.jsonl", copied / "sessions.jsonl"
    whole = metrics.read_text().splitlines()
    diverged = json.dumps({**json.loads(whole[-1]), "td_loss": float("nan")})
    metrics.write_text("\n".join([*whole, diverged]) + "\n" + whole[-1][:50])
    begun, ended = sessions.read_text().splitlines()
    sessions.write_text("\n".join([begun, begun[:20], begun, ended]) + "\n")
    page = Page(write_report([copied]).path)
    assert page.rows["lines of metrics"] == [str(len(whole) + 1)]
    assert page.rows["began"][0].endswith("; 2 sessions")
    (copied / "evaluation.json").write_text('{"mean": ')
    assert main(["report", str(copied)]) == 1
    assert f"error: {copied}/evaluation.json is damaged: " in capsys.readouterr().err


def test_a_run_that_has_begun_or_is_training_or_was_killed(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "now.html"
    sessions = copied / "sessions.jsonl"
    sessions.write_text(sessions.read_text().splitlines()[0] + "\n")
    with RunFolder.open(copied).hold():
        assert Page(write_report([copied], out).path).rows["state"] == ["training now"]
    assert Page(write_report([copied], out).path).rows["state"] == [
        "no end was recorded: killed, or training on another machine"
    ]
    (copied / "metrics.jsonl").write_text("")
    page = Page(write_report([copied], out).path)
    assert "No line of metrics has been written yet." in page.source
    assert page.charts.keys() == {"run"}  # the video
    (copied / "metrics.jsonl").unlink()
    assert Page(write_report([copied], out).path).rows["lines of metrics"] == ["0"]


def test_sessions_say_how_they_ended(tmp_path: Path) -> None:
    class Fail(train.Callback):
        def on_metrics(self, metrics: train.Metrics) -> None:
            if metrics["learner_updates"] > 20:
                raise RuntimeError("no more")

    run = tmp_path / "<b>run & 1"
    with pytest.raises(RuntimeError, match="no more"):
        train.run(small(serial=True), callbacks=[Fail()], folder=run)
    with (run / "sessions.jsonl").open("a") as file:
        file.write("{torn")
    resumed = train.run(small(serial=True, steps=500), folder=run, resume=True)
    whole = [line for line in (run / "sessions.jsonl").read_text().splitlines() if line != "{torn"]
    first, failed, second, ended = map(json.loads, whole)
    assert failed["how"] == "RuntimeError: no more"
    assert ended["how"] == "finished"
    assert ended["agent_steps"] == resumed.agent_steps
    assert first["agent_steps"] == 0 < second["agent_steps"]
    assert first["versions"]["numpy"] == np.__version__
    page = Page(write_report([run], tmp_path / "sessions.html").path)
    assert page.rows["began"][0].endswith("; 2 sessions")
    assert page.headings[0] == run.name
    assert run.name not in page.source


def test_a_large_video_is_linked(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copied.rename(tmp_path / "run of 1 #")
    monkeypatch.setattr(report, "EMBEDDED_BYTES", 10)
    (tmp_path / "reports").mkdir()
    written = write_report([run], tmp_path / "reports" / "out.html")
    (note,) = written.notes
    assert "MiB, linked and not part of this file" in note
    (link,) = {link for link in Page(written.path).links if link.endswith("mp4")}
    assert (written.path.parent / unquote(link)).samefile(*(run / "videos").iterdir())


def test_a_password_is_left_out(copied: Path) -> None:
    config = RunFolder.open(copied).config()
    dataclasses.replace(config, serial=False, replay="redis://me:secret@host:1").save(copied / "config.yaml")
    page = Page(write_report([copied]).path)
    assert page.rows["replay"] == ["redis://me:…@host:1"]


def test_many_lines_make_a_small_file(copied: Path) -> None:
    line = lines(copied)[-1]
    with (copied / "metrics.jsonl").open("w") as file:
        for number in range(20_000):
            values = {
                "time_s": number,
                "agent_steps": 100 * number,
                "return_mean": number % 97,
                "td_loss": 1.0 + number % 5,
            }
            file.write(json.dumps({**line, **values}) + "\n")
    (copied / "videos").rename(copied / "others")
    shown: list[tuple[str, str]] = []
    written = write_report([copied], progress=lambda activity, done: shown.append((activity, done)))
    assert written.bytes < 500_000
    assert Page(written.path).rows["lines of metrics"] == ["20,000"]
    assert ("drawing brought:Drawn", f"0 of {len(PANELS)} charts") in shown


def test_a_long_curve_is_short_and_keeps_its_peaks() -> None:
    x, y = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    y[55_555], y[77_777], y[10] = 100.0, np.nan, -100.0
    drawn = draw(Panel("unit", {}), [Curve("label", x, y, {})])
    assert drawn is not None
    assert len(drawn) < 40_000
    curve = max(re.findall(r' d="([^"]*)"', drawn), key=len)
    heights = [float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+)", curve)]
    highest, lowest = min(heights), max(heights)
    others = sorted(heights)[1:-1]
    assert others[0] - highest > 30
    assert lowest - others[-1] > 30


def test_the_legend_of_many_actors_has_the_first_and_the_last_with_values() -> None:
    x = np.arange(3.0)
    curves = [Curve(f"actor {n}", x, np.full(3, n if 0 < n < 20 else np.nan), {}) for n in range(22)]
    drawn = draw(Panel("unit", {}), curves)
    assert drawn is not None
    assert re.findall(r">(actor [^<]*)<", drawn) == ["actor 1 1", "actor 19 19"]
    assert draw(Panel("unit", {}), curves[:1]) is None


def test_wrong_runs_and_files_are_one_error(copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: object) -> str:
        assert main(["report", *map(str, arguments)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    (tmp_path / "empty").mkdir()
    assert error(copied, tmp_path / "empty", "--out", tmp_path / "x.html") == (
        f"error: {tmp_path}/empty is no run: it has no config.yaml"
    )
    assert not list(tmp_path.glob("x.html*"))
    assert "a report is an HTML file, name it metrics.html" in error(copied, "--out", copied / "metrics.jsonl")
    assert error(copied, "--out", tmp_path / "missing" / "x.html").endswith("make it first")
    (tmp_path / "folder.html").mkdir()
    assert "folder.html: Is a directory" in error(copied, "--out", tmp_path / "folder.html")
    assert "name their folders" in error()
    assert error(tmp_path / "nowhere").endswith("nowhere is no run: it has no config.yaml")
    (copied / "sessions.jsonl").unlink()
    (copied / "sessions.jsonl").symlink_to("/proc/self/mem")
    assert error(copied).startswith(f"error: {copied}/sessions.jsonl cannot be read: ")
    (copied / "config.yaml").write_text("environment: CartPole-v1\ngamma: 3\n")
    assert "gamma 3" in error(copied)
    with pytest.raises(ConfigurationError, match="name their folders"):
        write_report([])
    with pytest.raises(RunFolderError, match="is no run"):
        write_report([tmp_path / "nowhere"], tmp_path / "x.html")


def test_curves_of_runs_and_of_cleanrl_are_recorded(runs: list[Path], tmp_path: Path) -> None:
    events = tmp_path / "dqn_atari.py"
    with SummaryWriter(str(events)) as writer:
        for game in range(3):
            writer.add_scalar("charts/episodic_return", 2.0 * game, 1_000 * game)
    record = tmp_path / "report" / "games.jsonl"
    learning((events,), record)
    # Its other runs stay.
    learning((runs[1],), record)
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    *_, last, evaluated = [line for line in recorded if line["run"] == "second"]
    metrics = lines(runs[1])[-1]
    assert (last["updates"], last["frames"]) == (metrics["learner_updates"], metrics["env_frames"])
    assert evaluated["evaluation"]["mean"] == json.loads((runs[1] / "evaluation.json").read_text())["mean"]
    # The mean of the games so far, and frames instead of steps.
    cleanrl = [(line["frames"], line["score"]) for line in recorded if line["run"] == "dqn_atari.py"]
    assert cleanrl == [(0, 0.0), (8_000, 2.0)]
    assert record.with_suffix(".svg").read_text().count("second") == 1


def test_a_missing_extra_is_named(copied: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from innet_drl.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run([sys.executable, "-c", code, "report", copied], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "error: matplotlib is not installed: pip install 'innet-drl[bench]'\n"
