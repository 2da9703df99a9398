"""The documents: examples do what they show, and tables list what there is."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import re
import shutil
import ssl
import subprocess
import sys
import tomllib
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import own_networks
import pytest
import trustme
from places import ROOT
from steps import table
from training import small

import innet_drl as innet
from benchmarks.paper.cases import PaperFlags
from docs._settings import PAGES, filled
from innet_drl import train
from innet_drl.analysis.flags import BreakdownFlags, RatioFlags, WhatIfFlags
from innet_drl.train.flags import ActorFlags, EvaluateFlags, LearnerFlags, RecordFlags, ReportFlags, TrainFlags
from innet_drl.train.observe.metrics import METRICS
from innet_drl.train.settings.config import Config

DOCUMENTS = ROOT / "docs"


SESSIONS = sorted(
    str(page.relative_to(DOCUMENTS)) for page in DOCUMENTS.rglob("*.md") if "```pycon" in page.read_text()
)


@pytest.mark.parametrize("document", SESSIONS)
def test_examples_do_what_they_show(document: str) -> None:
    text = (DOCUMENTS / document).read_text()
    # All examples of a document are one session. Line numbers stay those of the document.
    session = re.sub(r"(?ms)^```pycon\n(.*?)^```$", r"\n\1\n", text)
    test = doctest.DocTestParser().get_doctest(session, {}, document, str(DOCUMENTS / document), 0)
    assert len(test.examples) > 5
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)


def test_the_examples_of_the_interface_are_found() -> None:
    assert {"tutorials/first-replay.md", "how-to/write-steps.md", "how-to/sample-batches.md", "how-to/serve.md"} < set(
        SESSIONS
    )


def test_tests_of_the_page_on_correctness_exist() -> None:
    root = DOCUMENTS.parent
    page = (DOCUMENTS / "explanation" / "correctness.md").read_text()
    cells = [row.split(" | ")[-1] for row in re.findall(r"(?m)^\| .*[^-] \|$", page)]
    assert len(cells) > 30
    for cell in [*cells, page.rsplit("\n\n", 1)[-1]]:
        file = None
        for name in re.findall(r"`([\w/.]+)`", cell):
            if name.endswith((".py", ".rs")):
                found = [path for folder in ("tests", "crates", "verify") for path in root.glob(f"{folder}/**/{name}")]
                assert found, name
                file, text = name, "".join(path.read_text() for path in found)
            elif file is not None:
                assert re.search(rf"(def test_|fn ){name}\(", text), f"{file} {name}"


def test_invariants_are_explained_where_they_are_kept() -> None:
    page = DOCUMENTS / "explanation" / "invariants.md"
    rows = re.findall(r"(?m)^\| [^|]+ \| \[`[^`]+`\]\(([^)]+)\) \| ([^|]+) \|$", page.read_text())
    assert len(rows) == page.read_text().count("\n| ") - 2
    for module, shown in rows:
        assert "\n//! # Invariant\n" in (page.parent / module).read_text(), module
        for name in re.findall(r"`([\w/.]+)`", shown):
            assert [path for folder in (".", "crates/**") for path in DOCUMENTS.parent.glob(f"{folder}/{name}*")], name


def test_files_that_the_pages_for_contributors_name_exist() -> None:
    root = DOCUMENTS.parent
    short = {f"{name}/": f"crates/replay_{name}/src/" for name in ("core", "client", "server")}
    short["replay_py/"] = "crates/replay_py/"
    for page, least in (("ARCHITECTURE.md", 20), ("CONTRIBUTING.md", 40)):
        folders = "crates|verify|python|tests|docs|examples|benchmarks|core|client|server|replay_py"
        named = re.findall(rf"`((?:{folders})/[\w./-]+)`", (root / page).read_text())
        assert len(named) > least
        for name in named:
            folder = name[: name.index("/") + 1]
            path = root / name if (root / folder).is_dir() else root / name.replace(folder, short[folder], 1)
            assert path.exists(), f"{page}: {name}"


def tls(folder: Path) -> dict[str, Any]:
    """Settings of a server with the certificate of an authority, which is `ca.pem` in the folder."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    return {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}


def test_every_statistic_is_explained(tmp_path: Path) -> None:
    text = (DOCUMENTS / "reference" / "statistics.md").read_text()
    chapter = text.split("## A memory\n")[1].split("\n## Gradient sums")[0]
    rows = re.findall(r"(?m)^\| (`.*?) \|", chapter)
    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    with (
        innet.Memory([table()]) as memory,
        memory.serve("innet://127.0.0.1:0", snapshot=tmp_path, gradients="127.0.0.1:0") as server,
    ):
        with innet.connect(server.addresses[0]) as replay:
            stats = replay.stats()
        with innet.Memory() as other, other.serve("innet://127.0.0.1:0") as second:
            with innet.connect(f"{server.addresses[0]},{second.addresses[0]}") as several:
                whole = several.stats()
        with innet.Memory() as other, other.serve("innets://127.0.0.1:0", **tls(tmp_path)) as third:
            with innet.connect(third.addresses[0], tls_ca=tmp_path / "ca.pem") as replay:
                guarded = replay.stats()
    groups = (stats, stats["tables"]["t"], stats["server"], stats["snapshots"], guarded, whole)
    assert explained == {name for group in groups for name in group}


def test_every_prefix_of_a_metric_is_explained(tmp_path: Path) -> None:
    text = (DOCUMENTS / "reference" / "statistics.md").read_text()
    prefixes = tuple(re.findall(r"(?m)^\| `(innet_\w+_)` \|", text.split("## Prometheus\n")[1]))
    loopback = "127.0.0.1:0"
    with (
        innet.Memory([table()]) as memory,
        memory.serve(
            f"innets://{loopback}", http=loopback, gradients=loopback, snapshot=tmp_path / "snapshots", **tls(tmp_path)
        ) as server,
        urllib.request.urlopen(
            f"{server.http}/metrics", context=ssl.create_default_context(cafile=tmp_path / "ca.pem")
        ) as answer,
    ):
        metrics = re.findall(r"(?m)^# HELP (\w+)", answer.read().decode())
    assert len(metrics) > 50
    assert {metric for metric in metrics if not f"{metric}_".startswith(prefixes)} == set()
    # Each prefix is a group's, not only a part of another one.
    assert {prefix for prefix in prefixes if not any(metric.startswith(prefix) for metric in metrics)} == set()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_certificates_tokens_and_settings_for_production_are_accepted(tmp_path: Path) -> None:
    page = (DOCUMENTS / "how-to" / "production.md").read_text()
    files: dict[str, str] = dict(re.findall(r'(?ms)^```\w+ title="([^"]+)"\n(.*?)^```$', page))
    subprocess.run(["bash", "-ec", files["certificate.sh"]], cwd=tmp_path, check=True, capture_output=True)
    settings = files["server.toml"].replace("/etc/innet", str(tmp_path)).replace("/var/lib/innet", str(tmp_path))
    (tmp_path / "server.toml").write_text(settings)
    command = [sys.executable, "-c", "from innet_drl.server_cli import main; main()"]
    command += ["serve", "--check", "--config", str(tmp_path / "server.toml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "the configuration can be served\n"), checked.stderr
    token = (tmp_path / "token").read_text().strip()
    pair: dict[str, Any] = {"tls_cert": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
    with innet.Memory() as memory, memory.serve("innets://127.0.0.1:0", token=token, **pair) as server:
        innet.connect(server.addresses[0], token=token, tls_ca=tmp_path / "authority.pem").close()


@pytest.mark.parametrize("name", PAGES)
def test_tables_of_settings_are_those_of_the_help(name: str) -> None:
    page = (DOCUMENTS / name).read_text()
    assert filled(name, page) == page, "run: python docs/_settings.py"


def test_pages_of_the_reference_are_those_of_the_docstrings(tmp_path: Path) -> None:
    # Here, because no other test needs griffe.
    from docs._reference import API, write

    write(tmp_path)
    written, committed = ({page.name: page.read_text() for page in folder.iterdir()} for folder in (tmp_path, API))
    stale = {name for name, _ in written.items() ^ committed.items()}
    assert stale == set(), "run: python docs/_reference.py"
    assert "### `Replay.sample`\n" in written["innet_drl.md"]


def test_the_readmes_programs_run() -> None:
    learning, program = re.findall(r"(?ms)^```python\n(.*?)^```$", (DOCUMENTS.parent / "README.md").read_text())
    names: dict[str, Any] = {}
    exec(learning.replace("50_000", "1_500"), names)
    assert names["model"]._n_updates > 0
    names = {}
    exec(program, names)
    assert names["batch"].observation.shape == (64, 4)
    assert names["replay"].stats()["tables"]["cartpole"]["updated_priorities"] > 0


def test_the_program_for_continuous_actions_runs() -> None:
    chapter = (DOCUMENTS / "how-to" / "environments.md").read_text().split("### Continuous actions\n")[1]
    program, *_ = re.findall(r"(?ms)^```python\n(.*?)^```$", chapter)
    names: dict[str, Any] = {}
    exec(program, names)
    assert names["batch"].action.shape == (64, 1)


@pytest.mark.parametrize("environment", ["mpe2", "rescue"])
def test_the_programs_for_several_agents_run(environment: str) -> None:
    """With the page's environment, and with one of masks and an early death."""
    page = (DOCUMENTS / "how-to" / "several-agents.md").read_text()
    if environment == "mpe2":
        pytest.importorskip("mpe2", reason="there is no mpe2 (pip install pettingzoo mpe2)")
    else:
        page = page.replace("from mpe2 import simple_speaker_listener_v4", "from rescue import Rescue")
        page = page.replace("simple_speaker_listener_v4.parallel_env()", "Rescue()")
    together, alone = re.findall(r"(?ms)^```python\n(.*?)^```$", page)
    names: dict[str, Any] = {}
    exec(together, names)
    batch = names["batch"]
    assert batch.reward.shape == (32,)
    assert set(batch.observation["agents"]) == set(batch.action) == set(names["team"].names)
    each: dict[str, Any] = {}
    exec(alone, each)
    assert set(each["batches"]) == set(batch.action)
    if environment == "mpe2":
        return
    state, alive, scout = (batch.observation[part] for part in ("state", "alive", "agents"))
    # The scout is dead from the third step on, and its part is zeros; the carrier's step goes on.
    assert np.array_equal(alive, np.stack([state[:, 0] < 3, np.ones(32)], 1))
    assert not scout["scout"]["observation"][state[:, 0] > 3].any()
    assert scout["scout"]["action_mask"][state[:, 0] < 3].tolist() == [[1, 0, 1]] * int((state[:, 0] < 3).sum())
    # Only the carrier's time limit ends the team's episode.
    assert (batch.discount > 0).all()
    # Alone, the scout's episode ends with its death: all its three-step returns reach it.
    assert (each["batches"]["scout"].discount == 0).all()
    assert (each["batches"]["carrier"].discount > 0).all()


def test_the_slack_of_the_page_is_that_of_a_run() -> None:
    page = (DOCUMENTS / "explanation" / "replay-ratio.md").read_text()
    (rule,) = re.findall(r"(?m)^slack = (.*)$", page)
    config = Config("CartPole-v1", actors=4, environments=16, chunk_steps=50, batch_size=512, prefetch=4)
    names = vars(config) | {"environments": config.all_environments}
    assert eval(rule, {}, names) == config.slack
    few = dataclasses.replace(config, chunk_steps=5)
    for number in (config.slack, few.slack, config.slack / config.samples_per_insert):
        assert f"{number:,.0f}" in page


def test_the_networks_and_losses_of_the_page_train(tmp_path: Path) -> None:
    chapters = (DOCUMENTS / "how-to/environments.md").read_text().split("## Networks\n")[1]
    programs = re.findall(r"(?ms)^```python\n(.*?)^```$", chapters)
    names: dict[str, Any] = {}
    for program in programs:
        exec(program, names)
    config = small(serial=True, steps=300)
    own: list[dict[str, Any]] = [
        {"network": names["MyNetwork"], "loss": names["squared"]},
        {"loss": names["Ensemble"]},
    ]
    for number, settings in enumerate(own):
        result = train.run(dataclasses.replace(config, **settings), folder=tmp_path / str(number))
        assert result.learner_updates > 0
        assert result.evaluation is not None


def test_arrays_of_a_batch_are_on_the_page_of_losses(tmp_path: Path) -> None:
    seen: set[str] = set()

    def look(online: Any, target: Any, batch: Any) -> Any:
        seen.update(batch.as_dict())
        return own_networks.squared(online, target, batch)

    train.run(small(serial=True, steps=200, loss=look), folder=tmp_path / "run")
    paragraph = (DOCUMENTS / "how-to/environments.md").read_text().split("`batch` has ")[1].split(". ")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == seen


def test_the_contents_list_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w/.-]+\.md)", (DOCUMENTS / "contents.md").read_text()))
    pages = {str(page.relative_to(DOCUMENTS)) for page in DOCUMENTS.rglob("*.md")} - {"contents.md"}
    assert pages - linked == {page for page in pages - linked if page.startswith(("reports/", "reference/api/"))}


def test_the_contents_list_every_example() -> None:
    named = set(re.findall(r"`(\w+\.(?:ipynb|py|toml))`", (DOCUMENTS / "contents.md").read_text()))
    assert {path.name for path in (DOCUMENTS.parent / "examples").iterdir() if path.is_file()} <= named


# Objects that the page on migration calls by these names.
OBJECTS: dict[str, Any] = {
    "agent": train.Agent,
    "batch": innet.Batch,
    "innet": innet,
    "memory": innet.Memory,
    "recorder": innet.Recorder,
    "replay": innet.Replay,
    "train": train,
    "tree": innet.SumTree,
    "writer": innet.Writer,
}


def our_code() -> list[str]:
    """Python on our side of the page on migration."""
    rows = re.findall(r"(?m)^\| .* \| (.*) \|$", (DOCUMENTS / "how-to" / "migrating.md").read_text())
    code = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    return [code for code in code if code.partition(".")[0] in OBJECTS]


@pytest.mark.parametrize("code", sorted(set(our_code())))
def test_names_of_the_page_on_migration_exist(code: str) -> None:
    def resolve(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return OBJECTS[node.id]
        if isinstance(node, ast.Call):  # a method of what a constructor makes
            return resolve(node.func)
        assert isinstance(node, ast.Attribute), ast.unparse(node)
        return getattr(resolve(node.value), node.attr)

    for node in ast.walk(ast.parse(code, mode="eval")):
        if isinstance(node, ast.Attribute):
            resolve(node)
        if isinstance(node, ast.Call):
            function = resolve(node.func)
            if function in (innet.Writer.append, innet.Writer.extend):  # their keyword arguments are columns
                continue
            # Both pass other keyword arguments on.
            passed_on = {train.preset: Config, innet.Table.from_spaces: innet.Table}.get(function)
            named = set(inspect.signature(function).parameters)
            if passed_on:
                named |= set(inspect.signature(passed_on).parameters)
            unknown = {keyword.arg for keyword in node.keywords} - named
            assert not unknown, f"{ast.unparse(node.func)} has no argument {unknown}"


@pytest.mark.slow
def test_the_program_of_the_training_page_trains_and_plays(tmp_path: Path) -> None:
    chapter = (DOCUMENTS / "how-to" / "training.md").read_text().split("## From Python\n")[1]
    program, *_ = re.findall(r"(?ms)^```python\n(.*?)^```$", chapter)
    (tmp_path / "program.py").write_text(program)
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "mean score" in ended.stdout
    assert (tmp_path / "runs" / "first" / "best.safetensors").is_file()


def test_a_study_prunes_by_a_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the documentation, with the small run instead of the preset; each trial is in a thread."""
    import optuna

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(train.PRESETS, "cartpole", small(serial=True, evaluation_period=40))
    (page,) = DOCUMENTS.rglob("training.md")
    programs = re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text())
    (program,) = [code for code in programs if "optuna" in code]
    names: dict[str, Any] = {"__name__": "study"}
    exec(program.replace("steps=20_000", "steps=600"), names)
    optuna.logging.disable_default_handler()
    study = optuna.create_study(direction="maximize")
    with ThreadPoolExecutor(1) as other:
        other.submit(study.optimize, names["objective"], n_trials=1).result()
        # No score of CartPole is above its lower bound.
        study.pruner = optuna.pruners.ThresholdPruner(lower=501)
        other.submit(study.optimize, names["objective"], n_trials=1).result()
    done, pruned = study.trials
    assert (done.state, pruned.state) == (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    assert done.value is not None
    assert len(done.intermediate_values) > 1 == len(pruned.intermediate_values)
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_every_metric_is_explained_in_the_order_of_a_line() -> None:
    text = (DOCUMENTS / "reference" / "statistics.md").read_text()
    table = text.split("## A training run")[1]
    explained = re.findall(r"(?m)^\| `(\w+)` \| `([\w/]+)` \|(.*?)\|", table)
    described = [(name, tag, unit.strip()) for name, tag, unit in explained]
    assert described == [(name, metric.tag, metric.unit) for name, metric in METRICS.items()]


SERVER_FLAGS = {"listen", "token_file", "trusted_network"}
SLURM_FLAGS = {"array", "cpus_per_task", "gpus", "job_name", "open_mode", "requeue", "signal", "time"}


@pytest.mark.parametrize(
    ("document", "classes", "others"),
    [
        (
            "how-to/training.md",
            (Config, TrainFlags, EvaluateFlags, RecordFlags, ReportFlags),
            {"help", "logdir", "listen"},
        ),
        ("how-to/environments.md", (Config,), set()),
        (
            "how-to/several-machines.md",
            (Config, TrainFlags, LearnerFlags, ActorFlags, EvaluateFlags),
            SERVER_FLAGS | SLURM_FLAGS | {"now"},
        ),
        (
            "how-to/ray.md",
            (Config, TrainFlags),
            {"working_dir", "entrypoint_resources", "entrypoint_num_gpus"},
        ),
        ("explanation/paper.md", (PaperFlags, TrainFlags, Config), set()),
        ("explanation/analysis.md", (BreakdownFlags, RatioFlags, WhatIfFlags, TrainFlags, Config), set()),
    ],
)
def test_every_flag_that_is_named_exists(document: str, classes: tuple[Any, ...], others: set[str]) -> None:
    text = (DOCUMENTS / document).read_text()
    for file in re.findall(r"\]\((\.\./\.\./deploy/[^)]+)\)", text):
        text += (DOCUMENTS / document).parent.joinpath(file).read_text()
    named = {name.replace("-", "_") for name in re.findall(r"(?<!-)--([a-z][a-z-]*)", text)}
    # `--config` is the field `config_file`.
    known = {field.name for flags in classes for field in dataclasses.fields(flags)} | {"config"}
    assert {name.removeprefix("no_") for name in named - known} - known == others


def test_install_commands_need_no_release() -> None:
    """Pages install from a checkout or a wheel; extras of the installed package are on the page on installing alone."""
    pages = [DOCUMENTS.parent / "README.md", *DOCUMENTS.rglob("*.md"), *(DOCUMENTS.parent / "examples").iterdir()]
    wanted = {
        (path.name, command)
        for path in pages
        if path.is_file() and path.name != "install.md"
        for command in re.findall(r"pip install ([^`\n]+)", path.read_text())
    }
    assert len(wanted) > 10
    known = tomllib.loads((DOCUMENTS.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, command in wanted:
        ours = re.match(r"'?\.(?:\[([\w,]+)\])?(?=['\s]|$)", command)
        assert ours, f"{page}: {command}"
        assert set((ours[1] or "dev").split(",")) <= set(known), f"{page}: {command}"
