"""The documents: examples do what they show, and tables list what there is."""

from __future__ import annotations

import dataclasses
import doctest
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import innet_drl as innet
from innet_drl.bench.flags import PaperFlags
from innet_drl.train.config import Config
from innet_drl.train.flags import EvaluateFlags, RecordFlags, TrainFlags
from innet_drl.train.metrics import Metrics
from steps import table

DOCUMENTS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("document", ["api.md"])
def test_examples_do_what_they_show(document: str) -> None:
    text = (DOCUMENTS / document).read_text()
    # All examples of a document are one session. Line numbers stay those of the document.
    session = re.sub(r"(?ms)^```pycon\n(.*?)^```$", r"\n\1\n", text)
    test = doctest.DocTestParser().get_doctest(session, {}, document, str(DOCUMENTS / document), 0)
    assert len(test.examples) > 20
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)


def test_every_statistic_is_explained() -> None:
    text = (DOCUMENTS / "api.md").read_text()
    chapter = text.split("## Statistics\n")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`.*?) \|", chapter)
    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    with innet.Replay([table()]) as memory, memory.serve("innet://127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as replay:
            stats = replay.stats()
    assert explained == stats.keys() | stats["tables"]["t"].keys() | stats["server"].keys()


def test_the_readmes_screen_of_python_runs() -> None:
    (screen,) = re.findall(r"(?ms)^```python\n(.*?)^```$", (DOCUMENTS.parent / "README.md").read_text())
    names: dict[str, Any] = {}
    exec(screen, names)
    assert names["batch"].observation.shape == (32, 4, 84, 84)
    assert names["replay"].get_parameters("policy", newer_than=0).version == 1


def test_the_program_of_the_training_page_trains_and_plays(tmp_path: Path) -> None:
    chapter = (DOCUMENTS / "training.md").read_text().split("## From Python\n")[1]
    program, *_ = re.findall(r"(?ms)^```python\n(.*?)^```$", chapter)
    (tmp_path / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "mean score" in ended.stdout
    assert (tmp_path / "runs" / "first" / "best.safetensors").is_file()


def test_every_metric_is_explained_in_the_order_of_a_line() -> None:
    text = (DOCUMENTS / "training.md").read_text()
    table = text.split("### The metrics")[1].split("\n## ")[0]
    explained = re.findall(r"(?m)^\| `(\w+)` \|", table)
    assert explained == [field.name for field in dataclasses.fields(Metrics)]


@pytest.mark.parametrize(
    ("document", "classes", "others"),
    [
        ("training.md", (Config, TrainFlags, EvaluateFlags, RecordFlags), {"help", "logdir", "listen"}),
        ("paper.md", (PaperFlags,), set()),
    ],
)
def test_every_flag_that_is_named_exists(document: str, classes: tuple[Any, ...], others: set[str]) -> None:
    text = (DOCUMENTS / document).read_text()
    named = {name.removeprefix("no-").replace("-", "_") for name in re.findall(r"(?<!-)--([a-z][a-z-]*)", text)}
    known = {field.name for flags in classes for field in dataclasses.fields(flags)}
    assert named - known == others
