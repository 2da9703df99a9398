"""The benchmarks' own arithmetic, and that their checks refuse wrong answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from wire_client import WireClient

import innet_drl as innet
from benchmarks import report
from benchmarks.attacks import REFUSALS, Attacker
from benchmarks.catalogue import BENCHMARKS, BYTES, TRANSITIONS, Benchmark, Goal
from benchmarks.contest import Entry, Measured
from benchmarks.fairness import TRANSPORTS, fairness, unfairness
from benchmarks.growth import standing
from benchmarks.hostile import HOSTILE, hostile
from benchmarks.killed import killed
from benchmarks.recording import GAMMA, N, Recording
from benchmarks.shards import shards
from benchmarks.supervised import supervised
from benchmarks.systems import Service
from benchmarks.table import LINKING, README, REPORTS, filled, report_page
from benchmarks.tasks import _Fed
from innet_drl.train.settings.machine import commit

pytestmark = pytest.mark.slow

ROWS, STREAMS, COUNT = 60, 2, 40


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Two streams of random frames; stream 0 has a game that ends after row 20."""
    random = np.random.default_rng(0)
    no = np.zeros((ROWS, STREAMS), bool)
    columns = {name: no.copy() for name in ("terminated", "truncated", "first", "final")}
    columns["first"][0] = True
    columns["terminated"][20, 0] = columns["final"][21, 0] = columns["first"][22, 0] = True
    columns |= {
        "frame": random.integers(1, 256, (ROWS, STREAMS, 84, 84), np.uint8),
        "action": random.integers(0, 4, (ROWS, STREAMS), np.uint8),
        "reward": random.integers(-1, 2, (ROWS, STREAMS)).astype(np.float32),
    }
    return Recording(columns)


@pytest.fixture
def batch(recording: Recording) -> dict[str, NDArray[Any]]:
    transitions = [recording.transition(row, stream) for row, stream in recording.transitions[:COUNT]]
    return {name: np.stack([each[name] for each in transitions]) for name in transitions[0]}


def cut(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    """Makes the first transition of a batch the one that the game's end cuts short after two of three steps."""
    rewards = recording.columns["reward"][19:21, 0]
    batch["observation"][0] = recording.observation(19, 0)
    batch["action"][0] = recording.columns["action"][19, 0]
    batch["reward"][0], batch["discount"][0] = rewards[0] + GAMMA * rewards[1], 0.0


def test_a_batch_of_the_recording_passes(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    recording.check(batch, COUNT)


def test_a_transition_that_an_end_cuts_short_passes(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    cut(recording, batch)
    recording.check(batch, COUNT)


@pytest.mark.parametrize("name", ["reward", "action", "discount"])
def test_a_wrong_number_is_refused(recording: Recording, batch: dict[str, NDArray[Any]], name: str) -> None:
    batch[name][7] += 1
    with pytest.raises(AssertionError, match="transition 7"):
        recording.check(batch, COUNT)


@pytest.mark.parametrize("name", ["reward", "discount"])
def test_a_wrong_number_of_a_cut_transition_is_refused(
    recording: Recording, batch: dict[str, NDArray[Any]], name: str
) -> None:
    cut(recording, batch)
    batch[name][0] += GAMMA**2
    with pytest.raises(AssertionError, match="transition 0"):
        recording.check(batch, COUNT)


def test_swapped_observations_are_refused(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    batch["observation"], batch["next_observation"] = batch["next_observation"], batch["observation"]
    with pytest.raises(AssertionError, match="transition 0"):
        recording.check(batch, COUNT)


def test_next_observations_in_another_order_are_refused(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    batch["next_observation"] = batch["next_observation"][::-1]
    with pytest.raises(AssertionError, match="transition 0"):
        recording.check(batch, COUNT)


def test_a_batch_of_one_transition_is_refused(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    same = {name: column[np.zeros(COUNT, int)] for name, column in batch.items()}
    with pytest.raises(AssertionError, match="1 different"):
        recording.check(same, COUNT)


def test_a_batch_of_another_shape_is_refused(recording: Recording, batch: dict[str, NDArray[Any]]) -> None:
    with pytest.raises(AssertionError, match="shape"):
        recording.check(batch, COUNT + 1)


def test_stacks_and_transitions_stay_within_a_game(recording: Recording) -> None:
    assert recording.observation(23, 0).any(axis=(1, 2)).tolist() == [False, False, True, True]
    whole = {tuple(each) for each in recording.transitions.tolist()}
    assert (20 - N, 0) in whole
    assert (21 - N, 0) not in whole


@pytest.mark.parametrize(("inserted", "right"), [(10_000, True), (9_880, True), (5_000, False), (10_100, False)])
def test_a_server_must_have_what_was_sent(monkeypatch: pytest.MonkeyPatch, inserted: int, right: bool) -> None:
    with subprocess.Popen(["true"]) as process:
        task = _Fed.__new__(_Fed)
        task.service, task.sent = Service(("127.0.0.1", 1), process, lambda: inserted), 10_000
    # Nobody waits for what will never come.
    monkeypatch.setattr("benchmarks.tasks.PATIENCE_S", 0.0)
    if right:
        task.check_count()
    else:
        with pytest.raises(AssertionError, match=f"10000 transitions were pushed, the server took in {inserted}"):
            task.check_count()


FIELDS = [
    "benchmark",
    "system",
    "value",
    "unit",
    "commit",
    "processor",
    "numpy",
    "p50_ms",
    "p99_ms",
    "per_s",
    "client_cpu_us",
    "server_cpu_us",
]


def lines(benchmark: Benchmark, measured: dict[str, Measured], capsys: pytest.CaptureFixture[str]) -> list[Any]:
    report.results(benchmark, measured)
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def measured(*counts: int, **more: Any) -> Measured:
    """Rounds of two seconds."""
    turn = {"elapsed": 2.0, "times_ms": [1.0, 2.0, 3.0], "client_cpu_s": 1.0, "server_cpu_s": 0.5, **more}
    return Measured("1.0", [{"count": count, **turn} for count in counts])


def test_more_transitions_a_second_are_better(capsys: pytest.CaptureFixture[str]) -> None:
    entries = [Entry(label, label, "Push") for label in ("innet", "slow", "fast")] + [Entry("copy", "machine", "Limit")]
    benchmark = Benchmark(
        "push", "", TRANSITIONS, entries, [Goal("innet", "slow", 4.0), Goal("innet", "slow", 6.0)], limit="copy"
    )
    rounds = {
        "innet": measured(1_000, 2_000, 3_000),
        "slow": measured(200, 400, 600),
        "fast": measured(500, 1_000, 1_500),
        "copy": measured(4_000, 8_000, 12_000),
    }
    ours, *_, met, not_met = lines(benchmark, rounds, capsys)
    assert set(FIELDS) <= set(ours)
    assert (ours["value"], ours["unit"], ours["per_s"], ours["p50_ms"]) == (1_000.0, "transitions/s", 1_000.0, 2.0)
    assert (ours["client_cpu_us"], ours["server_cpu_us"]) == (500.0, 250.0)
    assert (met["goal"], met["ratio"], met["met"]) == ("4 x slow", 5.0, True)
    assert (not_met["goal"], not_met["ratio"], not_met["met"]) == ("6 x slow", 5.0, False)
    assert (met["best_peer"], met["times_best_peer"]) == ("fast", 2.0)
    assert (met["limit"], met["times_limit"]) == ("copy", 0.25)


@pytest.mark.parametrize(("bytes_", "ratio", "met"), [(5_000, 0.5, True), (12_000, 1.2, False)])
def test_bytes_have_a_goal_of_their_own(
    capsys: pytest.CaptureFixture[str], bytes_: int, ratio: float, met: bool
) -> None:
    benchmark = Benchmark("wire", "", BYTES, [Entry("innet", "innet", "Wire")], [Goal("innet", at_most=100.0)])
    _, closing = lines(benchmark, {"innet": measured(100, bytes=bytes_)}, capsys)
    assert (closing["goal"], closing["ratio"], closing["met"]) == ("at most 100 bytes/transition", ratio, met)


def test_every_benchmark_of_this_project_has_a_goal() -> None:
    assert [each.name for each in BENCHMARKS if not each.goals] == ["limits"]


def test_peers_without_our_packages_run_the_tasks() -> None:
    absent = ["psutil", "torch", "gymnasium", "innet_drl", "loguru"]
    script = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.worker"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_results_make_no_commit_dirty(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        named = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "docs" / "reports").mkdir(parents=True)
    program, results = tmp_path / "program.py", tmp_path / "docs" / "reports" / "results.jsonl"
    program.touch()
    results.touch()
    git("init")
    git("add", ".")
    git("commit", "--message", "first")
    clean = commit(tmp_path, report.RESULTS)
    results.write_text("{}\n")
    assert commit(tmp_path, report.RESULTS) == clean
    assert len(clean) >= 7
    program.write_text("pass\n")
    assert commit(tmp_path, report.RESULTS).startswith(f"{clean}-dirty-")


def test_exponents_of_known_costs() -> None:
    values = (1, 10, 100)
    in_proportion = standing(values, [5.0, 50.0, 500.0], 1.0)
    assert in_proportion["ratio"] == pytest.approx(1.0)
    assert in_proportion["steepest"] == pytest.approx(1.0)
    assert in_proportion["met"]
    assert not standing(values, [5.0, 50.0, 500.0], 0.0)["met"]


def test_a_cost_that_grows_at_the_end_alone_is_found() -> None:
    late = standing((1, 10, 100, 1_000, 10_000), [1.0, 1.0, 1.0, 1.0, 3.0], 0.0)
    assert late["ratio"] == pytest.approx(np.log10(3) / 4)
    assert late["steepest"] == pytest.approx(np.log10(3))
    assert not late["met"]


def test_tables_of_recorded_lines() -> None:
    recorded = [
        {"benchmark": "limits", "system": "frame copy", "value": 2.0, "unit": "us"},
        {"benchmark": "push", "system": "innet", "value": 400_000.0, "unit": "transitions/s"},
        {"benchmark": "push", "system": "reverb", "value": 20_000.0, "unit": "transitions/s"},
        {"benchmark": "push", "system": "frame copy", "value": 500_000.0, "unit": "transitions/s"},
        {
            "benchmark": "push",
            "system": "innet",
            "goal": "20 x reverb",
            "ratio": 19.5,
            "met": False,
            "best_peer": "reverb",
            "times_best_peer": 19.5,
            "limit": "frame copy",
            "times_limit": 0.8,
        },
        {"benchmark": "connections_capacity", "system": "innet", "value": 1_472.0, "unit": "pushes/s"},
        *({"benchmark": "connections", "system": "innet", "value": 4.0, "p50_ms": 1.5, "p99_ms": 4.0},) * 3,
        {"benchmark": "connections", "system": "innet", "ratio": 1.0, "met": True},
        {"benchmark": "growth_window", "system": "innet", "value": 361.0, "at": 5},
        {"benchmark": "growth_window", "system": "innet", "ratio": 0.87, "steepest": 1.07, "met": True},
        {"benchmark": "training_loop", "system": "apart", "value": 24.0},
        {"benchmark": "training_loop", "system": "apart", "goal": "0.95 x plain", "ratio": 1.25, "met": True},
    ]
    of = defaultdict(list)
    for line in recorded:
        of[str(line["benchmark"])].append(line)
    machine = {"commit": "abc", "processor": "processor", "cores": 2, "python": "3.11"}
    of["limits"][0] |= machine
    rows = report_page(of, [], "2026-01-02-replay").splitlines()
    push = (
        "| transitions a second of one actor process that pushes 50 at a time | 400 K transitions/s "
        "| reverb 20 K | 19.5 x reverb | 20 x reverb, **not met** | 0.8 x frame copy |"
    )
    assert push in rows
    assert "| frame copy | 100 | 50 frames of 84x84 bytes copied |" in rows
    assert "| innet | 1472 | 1.5, 4 | 1.5, 4 | 1.5, 4 | 1 |" in rows
    assert "| steps of a sequence; sample 64 | 5: 361 | 1, 0.87 | 1.07 |" in rows
    assert "| apart | 24 | 1.25 |" in rows
    assert "| commit | `abc` |" in rows
    assert rows[0] == "# Replay memory beside its peers, 2026-01-02"
    page = filled("before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n", of)
    assert page.splitlines()[5] == "| push transitions, one actor | 400,000/s | Reverb 20,000/s | 20 times |"
    assert "old" not in page
    assert filled(page, of) == page


def test_pages_show_the_newest_report() -> None:
    folder = max(each for each in REPORTS.glob("*-replay") if each.is_dir())
    of = defaultdict(list)
    for text in (folder / "results.jsonl").read_text().splitlines():
        line = json.loads(text)
        of[line["benchmark"]].append(line)
    for page in LINKING:
        assert set(re.findall(r"\d{4}-\d\d-\d\d-replay", page.read_text())) == {folder.name}
    assert filled(README.read_text(), of) == README.read_text()
    assert (
        report_page(of, json.loads((folder / "sweep.json").read_text()), folder.name)
        == folder.with_suffix(".md").read_text()
    )


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(AssertionError, match="results"):
        filled("no marks", defaultdict(list))


def test_honest_clients_beside_a_hostile_one_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    hostile(minutes=0.1, steps_per_s=500.0, batches_per_s=50.0)
    *rows, _rate, _p99, _memory, steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["attacks"] is None for row in rows] == [True, False, False]
    assert all(row["value"] > 0 for row in rows)
    assert (steps["lost"], steps["doubled"], steps["met"]) == (0, 0, True)


def test_each_attack_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack of a random draw may not come in a short test."""
    created = set()
    with innet.Memory(HOSTILE) as memory, memory.serve("innet://127.0.0.1:0", token="token of the tests") as server:
        host, _, port = server.addresses[0].removeprefix("innet://").partition(":")
        attacker = Attacker((host, int(port)), "token of the tests", [table.name for table in HOSTILE], seed=0)
        call = WireClient.call

        def noting(client: WireClient, *arguments: Any, **request: Any) -> Any:
            answer = call(client, *arguments, **request)
            if "createTable" in request:
                created.update(memory.stats()["tables"])
            return answer

        monkeypatch.setattr(WireClient, "call", noting)
        for attack in dict.fromkeys(attacker.attacks):
            with suppress(*REFUSALS):
                attack()
    assert f"{HOSTILE[0].name}-0" in created


def test_a_hostile_client_holds_half_handshakes() -> None:
    """Servers refuse clients of another protocol number at once, so a wrong number would make the attack harmless."""
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
        host, _, port = server.addresses[0].removeprefix("innet://").partition(":")
        assert Attacker((host, int(port)), "", [], seed=0).half_handshakes() > 10


def test_the_worst_window_of_two_writers_counts() -> None:
    times = [0.0, 1.0, 2.0, 3.0]
    assert unfairness(times, [[0, 0], [10, 0], [10, 10], [20, 10]], 2.0) == 0.0
    assert unfairness(times, [[0, 0], [10, 0], [10, 10], [20, 10]], 1.0) == 1.0
    assert unfairness(times, [[5, 0], [15, 8], [25, 16], [35, 24]], 2.0) == pytest.approx(0.2)


def test_writers_behind_a_replay_ratio_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    fairness(seconds=2.0, window_s=1.0)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["system"] for line in told[::2]] == list(TRANSPORTS)
    for line, goal in zip(told[::2], told[1::2], strict=True):
        assert min(line["by_writer"]) > 0, line
        # A window has few pushes where other processes have the cores.
        assert goal["ratio"] < 20, goal


def test_steps_of_a_killed_server_with_snapshots_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    killed(times=3, every_ms=50)
    total, *goals = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert total["kills"] == 3
    assert total["value"] > 0
    assert len(goals) == 4
    for goal in goals:
        assert (goal["steps"], goal["met"]) == (0, True), goal


def test_steps_of_several_killed_servers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    supervised(servers=2, times=2, writers=4, every_ms=50)
    total, *goals = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert total["kills"] == len(total["counted_s"]) == len(total["placed"]) == 2
    assert total["value"] > 0
    assert len(goals) == 5
    assert [goal["steps"] for goal in goals[:4]] == [0] * 4


def test_several_servers_are_measured_against_one(capsys: pytest.CaptureFixture[str]) -> None:
    shards(rounds=1, seconds=0.2, steps=2_400)
    one, three, ratio, frequencies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert min(one["value"], three["value"], ratio["ratio"]) > 0
    assert frequencies["met"]
