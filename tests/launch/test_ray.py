"""Processes of a run on a Ray cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from places import HELPERS
from processes import Command
from serving import until
from training import lines, newest, newest_lines, small

import innet_drl as innet
from innet_drl import train
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.metrics import Metrics, values_of
from innet_drl.train.run_folder import RunFolder

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'innet-drl[ray]'")

from ray._private.internal_api import get_memory_info_reply, get_state_from_address  # noqa: E402 - where Ray is installed
from ray.cluster_utils import Cluster  # noqa: E402 - as above
from ray.exceptions import ActorUnavailableError  # noqa: E402

from innet_drl.launch.launcher import Ended, Launcher  # noqa: E402
from innet_drl.launch.ray import RayLauncher, bundles, check_node, cluster  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SMALL = ["train", "--launcher=ray", "--out=cart", "--preset=cartpole", "--environments=4", "--min-size=128"]
SMALL += ["--batch-size=32", "--layers=32", "--hidden=32", "--epsilon-anneal-steps=0", "--evaluation-games=3"]
SMALL += ["--no-video", "--report-seconds=0.2", "--actors=3", "--minutes=30", "--device=cpu", "--capacity=1000000"]
SMALL += ["--steps=1000000000"]
"""Flags of a small run, which evicts nothing."""
OPEN_STEPS = 4 * (4 + 5)
"""Steps of an actor's open windows: of each environment, a chunk and the steps of a return."""
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head and two nodes with two processors each, in name; this process is connected to the head."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Main functions of this file are imported on the nodes.
        environment.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *sys.path]))
        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 2, "include_dashboard": False})
        try:
            made.add_node(**NODE)
            made.add_node(**NODE)
            environment.setenv("RAY_ADDRESS", made.address)
            ray.init(made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


def processes(name: str = "cart") -> dict[str, str]:
    """Processes of a run, by name, and the nodes of their bundles."""
    found = {}
    for group in ray.util.placement_group_table().values():
        if group["name"] == f"innet-drl/{name}" and group["state"] != "REMOVED":
            for index, node in group["bundles_to_node_id"].items():
                found[["learner", "replay server", "evaluator", "actor 0", "actor 1", "actor 2"][int(index)]] = node
    return found


def named_actors(name: str = "cart") -> set[str]:
    """The run's Ray actors."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in listed if actor["namespace"] == f"innet-drl/{name}"}


def playing(run: Path) -> set[str]:
    """Actors that took steps before the newest lines of metrics, which are of about five seconds."""
    rates = [values_of(line, "actor_steps_per_s") for line in newest_lines(run, 25)]
    return {actor for each in rates for actor, rate in each.items() if rate > 0}


@pytest.mark.timeout(1200)
def test_a_run_outlives_a_node(nodes: Any, tmp_path: Path) -> None:
    run = tmp_path / "cart"
    others = {"evaluator", "actor 0", "actor 1", "actor 2"}
    with Command(*SMALL, "--evaluation-period=50", "--target-return=1e9", folder=tmp_path) as training:
        until(lambda: playing(run) == {"0", "1", "2"} or not training.runs)
        # An evaluation is a process of its own, which may end between two looks.
        looks = [processes()]
        while looks[-1].keys() != {"learner", "replay server"} | others and training.runs:
            looks.append(processes())
        placed = looks[-1]
        assert placed["learner"] == placed["replay server"] == nodes.head_node.node_id
        training.await_line("mean score")
        # Each evaluation is a process of its own.
        assert named_actors() | {"evaluator"} == others
        before = newest(run)["replay_steps"]

        victim = next(node for node in nodes.worker_nodes if node.node_id == placed["actor 2"])
        gone = {name for name in others if placed[name] == victim.node_id}
        nodes.remove_node(victim, allow_graceful=False)
        failed = "actor 2 is replaced, which is no restart: "
        training.await_line(failed)
        training.await_line("actor 2 waits for a node with 1 CPU")
        # The others play on.
        updates = newest(run)["learner_updates"]
        until(lambda: newest(run).get("learner_updates", 0) > updates + 20 or not training.runs)
        nodes.add_node(**NODE)
        until(lambda: playing(run) == {"0", "1", "2"} or not training.runs)
        assert processes()["actor 2"] not in (victim.node_id, None)
        assert training.interrupt() == -signal.SIGINT
        output = training.output
    assert len(gone) == 2
    assert output.count("is replaced, which is no restart") == len(gone - {"evaluator"})
    assert "its node has died" in output or "the actor's node was terminated" in output
    assert not named_actors()
    assert not processes()
    recorded = lines(run)
    stored = [line["replay_steps"] for line in recorded]
    assert stored == sorted(stored)
    assert stored[-1] > before
    # Every step that an actor has reported is in the memory, or was of its open windows.
    assert recorded[-1]["agent_steps"] - stored[-1] <= (3 + len(gone - {"evaluator"})) * OPEN_STEPS
    assert RunFolder(run).latest_checkpoint().state["learner"]["updates"] > updates


def test_a_cluster_that_is_too_small_is_waited_for(nodes: Any, tmp_path: Path) -> None:
    waiting = "waiting for the Ray cluster: "
    with Command(*SMALL, "--actors=40", folder=tmp_path) as training:
        training.await_line(waiting)
        assert training.interrupt() == -signal.SIGINT
        assert "6 of 6 CPU are free, and the run needs 43, of which 2 on this node" in training.output
        assert training.output.count(waiting) == 1
        assert "Traceback" not in training.output
    assert not list(tmp_path.iterdir())
    assert not processes()


def test_a_node_that_can_never_hold_the_learner_is_named(nodes: Any) -> None:
    """Other nodes do not help: the learner is on this one."""
    threads = (
        r"has 2 CPU, too few for learner, replay server \(3\): lower learner_threads or learners, name a server "
        r"\(replay\), or start the"
    )
    gpus = r"has 2 GPU, too few for learner \(3\): take device cpu, or start the command on another node"
    here = {"NodeManagerAddress": "here", "Resources": {"CPU": 2.0, "GPU": 2.0}}
    with pytest.raises(ConfigurationError, match=gpus):
        check_node({"learner": {"CPU": 1, "GPU": 3}}, here)
    with pytest.raises(ConfigurationError, match=threads):
        with cluster(small(device="cpu", actors=1, learner_threads=2), "large", print):
            pass
    assert not processes("large")


def test_the_learner_gets_the_gpus_that_are_reserved_for_it(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with cluster(small(device="auto", actors=1), "one", print):
        assert os.environ["CUDA_VISIBLE_DEVICES"] in ("0", "1")
        assert named_actors("one") == {"learner"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    with cluster(small(device="cpu", actors=1), "none", print):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert not named_actors("none")


def test_a_node_that_is_in_use_is_waited_for(nodes: Any) -> None:
    said: list[str] = []

    def say(what: str) -> None:
        said.append(what)
        if "waiting" in what:
            raise KeyboardInterrupt

    with cluster(small(device="cpu", actors=1), "first", print):
        with pytest.raises(KeyboardInterrupt), cluster(small(device="cpu", actors=1), "second", say):
            pass
        with pytest.raises(ConfigurationError, match="another run named 'first' is on the cluster: choose another"):
            with cluster(small(device="cpu", actors=1), "first", print):
                pass
    waiting = r"waiting for the Ray cluster: \d of 6 CPU are free, and the run needs \d, of which 2 on this node \(.+\)"
    assert re.fullmatch(waiting, said[-1])
    assert not processes("second")


def test_messages_arrive_until_the_process_ends(nodes: Any) -> None:
    with cluster(small(device="cpu", actors=2), "messages", print) as launchers, launchers() as launcher:
        launcher.start("actor 0", answer, 2, 21)
        launcher.start("actor 1", fail)
        assert received(launcher, 2) == {"actor 0": [42, Ended(0)], "actor 1": [Ended(5)]}
        # The names are free again.
        launcher.start("actor 0", answer, 3, 5)
        assert received(launcher, 1) == {"actor 0": [15, Ended(0)]}


def test_messages_of_a_lost_connection_come_again(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ray.get
    lost: list[Any] = []

    def lose_the_first(ref: Any) -> Any:
        found = get(ref)
        if lost:
            return found
        lost.append(found)
        raise ActorUnavailableError("its connection is lost", None)

    with cluster(small(device="cpu", actors=1), "lost", print) as launchers, launchers() as launcher:
        launcher.start("actor 0", answer, 2, 21)
        with monkeypatch.context() as patch:
            patch.setattr(ray, "get", lose_the_first)
            assert received(launcher, 1) == {"actor 0": [42, Ended(0)]}
        assert lost


def test_a_process_whose_node_dies_before_it_is_known_has_ended(nodes: Any) -> None:
    def die() -> None:
        os._exit(1)

    dying = ray.remote(die).options(max_retries=0)
    with cluster(small(device="cpu", actors=1), "gone", print) as launchers, launchers() as launcher:
        assert isinstance(launcher, RayLauncher)
        launcher.start("actor 0", answer, 2, 21)
        # As the answers of a node that died at once.
        launcher._nodes["actor 0"], launcher._polls = dying.remote(), {dying.remote(): "actor 0"}
        until(lambda: len(launcher._ready([launcher._nodes["actor 0"], *launcher._polls])) == 2)
        ((name, ended),) = launcher.messages()
    assert name == "actor 0"
    assert isinstance(ended, Ended)
    assert ended.failure is not None
    assert not ended.failure.counts


def answer(factor: int, number: int, pipe: Any) -> None:
    """The main function of a process that multiplies two numbers."""
    pipe.send(factor * number)
    pipe.close()


def fail(pipe: Any) -> None:
    """The main function of a process that ends at once."""
    os._exit(5)


def received(launcher: Launcher, number: int) -> dict[str, list[Any]]:
    """The messages of so many processes until they have ended."""
    found: list[tuple[str, Any]] = []

    def ended() -> bool:
        found.extend(launcher.messages())
        return sum(isinstance(message, Ended) for _, message in found) == number

    until(ended)
    return {name: [message for owner, message in found if owner == name] for name, _ in found}


def test_an_actor_that_fails_ends_the_run_with_its_reason(nodes: Any, tmp_path: Path) -> None:
    flags = ["--environment=brought:Failing", "--preset=vector", "--actor-restarts=0"]
    with Command(*SMALL, *flags, folder=tmp_path) as training:
        assert training.end() == 1
        assert re.search(r"error: actor \d failed, and no restart is left.*the motor \d+ is stuck", training.output)
    assert not named_actors()


def test_a_program_trains_on_its_own_connection(nodes: Any, tmp_path: Path) -> None:
    """With an environment that no node can import, and evaluations elsewhere that end the run."""

    def make() -> Any:
        return gymnasium.make("CartPole-v1")

    config = small(environment=make, device="cpu", steps=1_000_000, evaluation_period=50, target_return=1.0)
    result = train.run(config, folder=tmp_path / "run", launcher="ray")
    assert result.best_mean is not None
    assert result.best_mean >= 1.0
    assert ray.is_initialized()
    assert not processes("run")


def stored_objects() -> int:
    """Bytes of all objects that the object stores of the cluster's nodes have ever had."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    found: int = get_memory_info_reply(state).store_stats.cumulative_created_bytes
    return found


def test_steps_go_to_the_replay_server_alone(nodes: Any, tmp_path: Path) -> None:
    """Chunks of these steps are longer than what Ray passes on without its object store."""
    by_writer: dict[str, int] = {}

    class Watch(train.Callback):
        def on_metrics(self, metrics: Metrics) -> None:
            writers = memory.stats()["tables"]["run"]["by_writer"]
            by_writer.update((writer["name"], writer["steps"]) for writer in writers)
            if len(by_writer) == 2 and min(by_writer.values()) >= 400:
                raise train.StopTraining("both actors have played")

    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
        config = small(
            replay=server.addresses[0],
            environment="brought:Long",
            steps=1_000_000,
            actors=2,
            device="cpu",
            video=False,
        )
        before = stored_objects()
        result = train.run(config, folder=tmp_path / "run", launcher="ray", callbacks=[Watch()])
        created = stored_objects() - before
        inserted = memory.stats()["tables"]["run"]["inserted_steps"]
    assert by_writer.keys() == {"actor 0", "actor 1"}
    assert inserted >= max(result.agent_steps, sum(by_writer.values())) - 2 * OPEN_STEPS > 700
    assert created < inserted * 4 * 5000 / 100


PAGE = (
    r"╭─+ brought:Printing in cart ─+╮",
    r"time_s 0:\d\d seconds_left \d:\d\d",
    r"agent_steps [\d,]+ agent_steps_per_s [\d,]+",
    r"learner_updates [\d,]+ learner_updates_per_s [\d,.]+",
    r"return_mean 5.00 return_best 5.00",
    r"evaluation_mean - evaluation_best -",
    r"td_loss \d.* q_mean \d.*",
    r"samples_per_insert_now \d.* samples_per_insert_target \d.*",
    r"replay_steps [\d,]+ replay_bytes \d+ MiB",
    r"actor_scores 0: 5.00 1: 5.00",
    r"actor_steps_per_s 0: [\d,]+ 1: [\d,]+",
    r"actor_waits 0: \d+% 1: \d+%",
    r"learner_time .*\d+%.*",
    r"actor_time .*\d+%.*",
)
"""Rows of the page of a run with two actors."""


def test_a_local_cluster_shows_the_page_and_what_environments_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Otherwise Ray shows a line once that several processes print.
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *sys.path]))
    monkeypatch.setenv("TERM", "xterm")
    printed = [rf"\(actor {actor} pid=\d+.*\) the motor starts" for actor in range(2)]
    wanted = [*PAGE, *printed, ".* INFO starting a local Ray cluster; RAY_ADDRESS names another one"]

    def complete(shown: str) -> bool:
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        rows = {" ".join(row.strip("│ ").split()) for row in text.splitlines()}
        wanted[:] = [row for row in wanted if not any(re.fullmatch(row, shown) for shown in rows)]
        return not wanted

    command = [sys.executable, "-m", "innet_drl", *SMALL, "--environment=brought:Printing", "--preset=vector"]
    status, shown = in_terminal([*command, "--actors=2", "--minutes=2"], tmp_path, complete)
    assert not wanted, shown[-8000:]
    assert status == -signal.SIGINT
    assert "Traceback" not in shown
    assert RunFolder(tmp_path / "cart").latest_checkpoint().state["learner"]["updates"] > 0


def in_terminal(command: list[str], folder: Path, complete: Callable[[str], bool]) -> tuple[int, str]:
    """Runs a command in a terminal of its own, and interrupts it once its output is complete.

    Returns:
        Its exit status, and its output.
    """
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (40, 120))
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, cwd=folder, start_new_session=True) as process:
        os.close(end)
        shown, interrupted = "", False
        # Linux: EIO after the last process that has the terminal.
        with contextlib.suppress(OSError):
            while data := os.read(terminal, 1 << 16):
                shown += data.decode(errors="replace")
                if not interrupted and complete(shown):
                    process.send_signal(signal.SIGINT)
                    interrupted = True
        os.close(terminal)
        return process.wait(), shown


def test_bundles_are_a_runs_processes() -> None:
    config = small(actors=2, learner_threads=3, environment_threads=2, evaluation_period=10, device="cpu")
    assert bundles(config, gpus=2) == {
        "learner": {"CPU": 3},
        "replay server": {"CPU": 1},
        "evaluator": {"CPU": 1},
        "actor 0": {"CPU": 2},
        "actor 1": {"CPU": 2},
    }
    elsewhere = small(actors=1, learners=2, replay="innet://host:7710", device="auto")
    assert bundles(elsewhere, gpus=8) == {"learner": {"CPU": 2, "GPU": 2}, "actor 0": {"CPU": 1}}
    assert bundles(elsewhere, gpus=1)["learner"]["GPU"] == 1
    assert "GPU" not in bundles(elsewhere, gpus=0)["learner"]


@pytest.mark.parametrize(
    ("flags", "address", "message"),
    [
        (["--serial"], "", "launcher ray: omit it in a serial run"),
        (["--replay=unix:///x"], "", "actors on other nodes cannot reach replay unix:///x"),
        ([], "ray://head:10001", "RAY_ADDRESS is ray://head:10001, but the learner has to be on a node"),
        ([], "127.0.0.1:9", "nothing answers at RAY_ADDRESS=127.0.0.1:9"),
    ],
)
def test_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], address: str, message: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with Command(*SMALL, *flags, folder=tmp_path) as training:
        assert training.end() == 1
        errors = [line for line in training.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not list(tmp_path.iterdir())
