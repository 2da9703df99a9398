"""The examples: each runs as a user would run it, and shows what its first lines promise."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT
from serving import SERVE, Server

import innet_drl as innet

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def run_example(name: str, *flags: str, warnings: str = "error") -> str:
    command = [sys.executable, "-W", warnings, str(EXAMPLES / name), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # On a busy machine a call tells whom it waits for.
    assert [line for line in ended.stderr.splitlines() if "still waiting" not in line] == []
    return ended.stdout


@contextlib.contextmanager
def example_server(folder: Path) -> Iterator[str]:
    """A server with the example's configuration."""
    address = f"unix://{folder}/server"
    # Addresses of the command line replace the file's, whose port may be in use on this machine.
    server = subprocess.Popen([*SERVE, address, "--config", str(EXAMPLES / "server.toml")])
    try:
        yield address
    finally:
        server.terminate()
        server.wait(timeout=60)


def percentages(output: str) -> list[int]:
    return [int(percent) for percent in re.findall(r"(\d+)%", output)]


def means(output: str) -> list[float]:
    return [float(mean) for mean in re.findall(r"(?:mean|games|mean score) (\d+\.\d)", output)]


def test_a_raised_priority_is_sampled_more_often_and_weighs_less() -> None:
    output = run_example("replay.py", "--steps", "2000")
    before, after = percentages(output)
    assert after > 1.3 * before
    assert re.search(r"weight 0\.\d+, others 1\.0", output)


# A random policy keeps the pole up for 22 steps, and one that always pushes to the same side for 9.
CHANCE = 22.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [(), ("--uniform",)], ids=["prioritized", "uniform"])
def test_dqn_learns_in_one_process(flags: tuple[str, ...]) -> None:
    scores = means(run_example("dqn_cartpole.py", "--steps", "16000", *flags))
    assert len(scores) == 4
    assert max(scores) > 4 * CHANCE


@pytest.mark.timeout(300)
def test_dqn_learns_in_jax() -> None:
    scores = means(run_example("dqn_cartpole_jax.py", "--steps", "16000"))
    assert len(scores) == 4
    assert max(scores) > 4 * CHANCE


@pytest.mark.timeout(300)
def test_a_learner_in_the_cloud_learns_from_actors_at_the_edge() -> None:
    output = run_example("edge_cloud.py", "--updates", "3000", "--delay-ms", "5")
    (mean,) = re.findall(r"3000 updates, \d+ a second: greedy mean (\d+\.\d)", output)
    assert float(mean) > 2 * CHANCE
    assert re.search(r"\d+\.\d kB an update crossed the link", output)


@pytest.mark.timeout(300)
def test_the_ends_of_a_link_are_programs_of_their_own(tmp_path: Path) -> None:
    with Server("innet://127.0.0.1:0") as server, (tmp_path / "actors").open("w") as printed:
        command = [sys.executable, str(EXAMPLES / "edge_cloud.py"), "--role", "actors", "--server", server.address]
        # Ctrl-C in its terminal ends the program with its actors.
        actors = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            output = run_example("edge_cloud.py", "--role", "learner", "--server", server.address, "--updates", "300")
            assert actors.poll() is None
        finally:
            os.killpg(actors.pid, signal.SIGINT)
            actors.wait(timeout=60)
        with innet.connect(server.address) as replay:
            # The learner writes no steps, and actors publish nothing.
            assert replay.stats()["tables"]["dqn"]["inserted_items"] > 0
            assert replay.parameters() == {"dqn": 3}
        assert "KeyboardInterrupt" in (tmp_path / "actors").read_text()
    assert re.search(r"300 updates, \d+ a second: greedy mean \d+\.\d", output)


@pytest.mark.timeout(300)
def test_an_actor_and_a_learner_learn_over_a_server(tmp_path: Path) -> None:
    with example_server(tmp_path) as address:
        scores = means(run_example("client_server.py", "--steps", "12000", "--server", address))
        with innet.connect(address) as memory:
            assert memory.parameters()["dqn"] >= 300
            assert memory.stats()["tables"]["dqn"]["inserted_items"] > 10_000
    assert max(scores) > 4 * CHANCE


@pytest.mark.timeout(300)
def test_demonstrations_teach_offline_and_stay_in_half_of_each_batch() -> None:
    offline, *online = means(run_example("offline_to_online.py"))
    assert offline > 2 * CHANCE
    assert max(online) > 4 * CHANCE


@pytest.mark.timeout(300)
def test_collectors_of_torchrl_fill_a_buffer_at_a_server() -> None:
    # TorchRL warns at its import.
    scores = means(run_example("torchrl_collector.py", "--updates", "1500", "--goal", "501", warnings="ignore"))
    assert len(scores) == 3
    assert max(scores) > 4 * CHANCE


@pytest.mark.timeout(300)
def test_an_environment_of_ones_own_is_trained() -> None:
    (mean,) = re.findall(r"mean score of \d+ games: (-\d+\.\d)", run_example("own_environment.py", "--minutes", "0.5"))
    # Random play has -75.
    assert float(mean) > -15


@pytest.mark.timeout(300)
def test_hindsight_solves_games_whose_goal_is_hardly_ever_reached() -> None:
    without, hindsight = (int(share) for share in re.findall(r"(\d+)% of 100 games", run_example("hindsight.py")))
    assert hindsight > without + 40


def test_a_memory_on_three_servers_is_sampled_by_priority_and_goes_on_without_one() -> None:
    output = run_example("several_servers.py")
    together = re.findall(r"together: \S+ has (\d+) of at most 10000 steps, (\d+)% of the priorities, (\d+)%", output)
    assert [int(steps) > 0 for steps, _, _ in together] == [True] * 3
    assert all(abs(int(priority) - int(samples)) <= 5 for _, priority, samples in together)
    assert len(re.findall("one away: .* steps", output)) == 2
    assert len(re.findall("one away: .* is away", output)) == 1


@pytest.mark.timeout(300)
def test_ape_x_learns_with_several_actors() -> None:
    output = run_example("apex_single_file.py", "--actors", "3", "--updates", "8000")
    assert max(means(output)) > 3 * CHANCE


@pytest.mark.timeout(300)
def test_stored_states_answer_what_a_feed_forward_network_cannot() -> None:
    assert max(percentages(run_example("r2d2_sequences.py", "--steps", "20000"))) > 90
    assert max(percentages(run_example("r2d2_sequences.py", "--steps", "20000", "--feed-forward"))) < 60


def test_prioritized_indexes_of_own_tensors_learn_in_fewer_updates() -> None:
    output = run_example("sum_tree_buffer.py", "--length", "9", "--updates", "4000")
    prioritized, uniform = (int(updates) for updates in re.findall(r": learned after (\d+) updates", output))
    assert 2 * prioritized < uniform


@pytest.mark.timeout(300)
def test_a_queue_trains_on_policy_and_holds_no_sequence_twice() -> None:
    output = run_example("fifo_queue.py", "--steps", "96000")
    assert max(means(output)) > 4 * CHANCE
    # Sequences that wait are fewer than a batch: the learner takes all others.
    assert all(int(waiting) < 32 for waiting in re.findall(r"(\d+) sequences wait", output))


@pytest.mark.timeout(300)
def test_a_language_model_learns_while_its_processes_are_killed() -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / "grpo.py"), "--seconds", "40"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as example:
        assert example.stdout is not None
        printed: list[str] = []
        kills = ["run_rollouts", "learn", "run_rollouts"]
        for line in example.stdout:
            printed.append(line)
            if line.startswith("version") and kills:
                name = kills.pop()
                # The newest of this role.
                process = [int(each.split()[-1]) for each in printed if each.startswith(f"{name} is process")][-1]
                os.kill(process, signal.SIGKILL)
        assert example.wait() == 0
    assert not kills
    assert len([line for line in printed if " is process " in line]) == 3 + 3
    right = [int(percent) for percent in re.findall(r": (\d+)% right", "".join(printed))]
    assert right[-1] > right[0]
    written, _, expired, waiting = map(int, re.findall(r"items (\d+)", printed[-1]))
    # Each version is learned from eight groups. None is lost: what a killed learner has not acknowledged goes to the
    # next one, which learns from one batch again at most.
    learned = 8 * (int(re.findall(r"version (\d+):", "".join(printed))[-1]) - 1)
    assert learned - 8 <= written - expired - waiting <= learned


def test_the_readmes_program_runs_on_the_server_of_the_example_configuration(tmp_path: Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    (program,) = [code for code in re.findall(r"(?ms)^```python\n(.*?)^```$", readme) if "innet.Memory(" in code]
    with example_server(tmp_path) as address:
        remote, changed = re.subn(r"innet\.Memory\(\[?(\w+)\]?\)", rf"innet.connect({address!r}, tables=[\1])", program)
        assert changed == 1
        names: dict[str, Any] = {}
        exec(remote, names)
        with innet.connect(address) as replay:
            assert list(replay.tables()) == [names["table"].name]
            assert replay.stats()["tables"]["cartpole"]["inserted_items"] > 0
        names["replay"].close()


@pytest.mark.timeout(300)
def test_the_notebook_trains_an_agent_that_plays(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "first_agent.ipynb", as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # Outputs would differ at every run, and in every difference between commits.
    assert all((cell.outputs, cell.execution_count) == ([], None) for cell in code)
    (training,) = [cell for cell in code if "minutes=minutes" in cell.source]
    training.source = training.source.replace("minutes=minutes", "steps=12_000")
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    before, after = percentages(printed)
    assert after > before
    assert float(*re.findall(r"best mean score (\d+\.\d+)", printed)) > 0
    assert float(*re.findall(r"score of a game: (\d+)", printed)) > 0
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "evaluation.json").is_file()
