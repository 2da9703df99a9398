"""Learner, actors and evaluations as processes that are started separately: they join, wait, leave and come back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from processes import Command, namespaces_missing
from serving import SERVE, Server, until
from training import lines, newest, small

from innet_drl.launch import start
from innet_drl.train.observe.metrics import values_of
from innet_drl.train.play.exploration import epsilon_ladder
from innet_drl.train.run_folder import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ["--preset=cartpole", "--environments=4", "--min-size=128", "--capacity=4000", "--batch-size=32"]
SMALL += ["--layers=32", "--hidden=32", "--epsilon-anneal-steps=0", "--evaluation-games=3", "--evaluation-period=0"]
SMALL += ["--no-video", "--report-seconds=0.2", "--actors=2"]
"""Flags of a small run."""
SEEDING = '''
import gymnasium


class Seeding(gymnasium.Wrapper):
    """Notes the seed of each environment's first game."""

    def __init__(self, environment, file):
        super().__init__(environment)
        self._file = file

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            with open(self._file, "a") as file:
                file.write(f"{seed}\\n")
        return self.env.reset(seed=seed, options=options)


def make(file):
    return Seeding(gymnasium.make("CartPole-v1"), file)
'''


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("innet://127.0.0.1:0") as serving:
        yield serving


@pytest.fixture
def replay() -> Iterator[str]:
    """The value of `--replay` for two servers."""
    with Server("innet://127.0.0.1:0") as one, Server("innet://127.0.0.1:0") as two:
        yield f"{one.address},{two.address}"


def updates(run: Path) -> int:
    """Updates in the last whole line of metrics."""
    return int(newest(run).get("learner_updates", 0))


def test_processes_that_are_started_separately_train_an_agent(replay: str, tmp_path: Path) -> None:
    run = tmp_path / "cart"
    with ExitStack() as stack:

        def command(*arguments: str) -> Command:
            return stack.enter_context(Command(*arguments, folder=tmp_path))

        follower = command("evaluate", "--follow", "cart", "--games=3")
        early = command("actor", "--replay", replay, "--index=0")
        early.await_line("waiting for a learner (innet-drl learner --replay innet://127.0.0.1")
        learning = ["learner", "--replay", replay, "--out=cart", "--checkpoint-minutes=0.01", *SMALL]
        learner = command(*learning, "--steps=1000000000")
        until(lambda: updates(run) > 10 or not learner.runs)
        late = command("actor", "--replay", replay, "--index=1")
        until(lambda: values_of(newest(run), "actor_scores").keys() == {"0", "1"} or not learner.runs)
        twin = command("actor", "--replay", replay, "--index=1")
        twin.await_line("another actor 1 plays for run cart")
        assert twin.interrupt() == -signal.SIGINT
        assert learner.interrupt() == -signal.SIGINT
        assert early.runs
        assert late.runs
        # It has taken these steps: what is missing is the evaluation.
        learner = command(*learning, "--steps=100")
        ended = [process.end() for process in (learner, early, late, follower)]
        outputs = [early.output, late.output, follower.output]
    assert ended == [0, 0, 0, 0]
    assert all("run cart has ended" in output for output in outputs[:2])
    # The ladder is of all environments of both actors.
    ladder = epsilon_ladder(8)
    for output, first, last in zip(outputs[:2], (0, 4), (3, 7), strict=True):
        assert f"4 environments that explore with {ladder[first]:.3g} to {ladder[last]:.3g}" in output
    last_line = lines(run)[-1]
    assert last_line["agent_steps"] > 128
    assert last_line["games"] > 0
    reports = [json.loads(line) for line in outputs[2].splitlines() if line.startswith("{")]
    evaluated = json.loads((run / "evaluation.json").read_text())
    assert reports[-1]["runs"][0]["agent_steps"] == evaluated["agent_steps"]
    means = [evaluated["mean"], *(report["mean"] for report in reports)]
    assert RunFolder(run).best_agent().state["mean"] == max(means)


def test_a_learner_whose_actors_are_gone_for_good_ends_with_a_checkpoint(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "cart"
    with ExitStack() as stack:

        def command(*arguments: str) -> Command:
            return stack.enter_context(Command(*arguments, folder=tmp_path))

        actor = command("actor", "--replay", server.address, "--index=0")
        actor.await_line("waiting for a learner")
        learning = ["learner", "--replay", server.address, "--out=cart", "--steps=1000000000", "--actor-patience=20"]
        learner = command(*learning, *SMALL)
        until(lambda: updates(run) > 20 or not learner.runs)
        actor.kill()
        assert learner.end() == 1
        output = learner.output
    assert 'no writer of table "cart" has been connected for' in output
    assert 'the last was "actor 0"' in output
    assert "continue with --resume cart" in output
    assert RunFolder(run).newest_checkpoint() is not None


def test_each_process_may_be_killed_and_the_run_goes_on(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "cart"
    learning = ["learner", "--replay", server.address, "--out=cart", "--steps=1000000000", "--checkpoint-minutes=0.01"]
    with ExitStack() as stack:

        def command(*arguments: str) -> Command:
            return stack.enter_context(Command(*arguments, folder=tmp_path))

        learner = command(*learning, *SMALL)
        killed, kept = (command("actor", "--replay", server.address, f"--index={index}") for index in (0, 1))
        until(lambda: updates(run) > 20 or not learner.runs)
        killed.kill()
        replaced = command("actor", "--replay", server.address, "--index=0")
        replaced.await_line("actor 0 plays for run cart")

        until(lambda: RunFolder(run).newest_checkpoint() is not None)
        learner.kill()
        # The replay ratio holds the actors back.
        kept.await_line("waiting for the learner of run cart")
        learner = command(*learning, *SMALL)
        learner.await_line("continuing the run of cart")
        kept.await_line("actor 1 continues")
        again = updates(run)
        until(lambda: updates(run) > again + 50 or not learner.runs)
        assert kept.output.count("plays for run cart") == 1

        # It comes back empty.
        server.kill()
        server.start()
        kept.await_line("plays for run cart", times=2)
        replaced.await_line("plays for run cart", times=2)
        again = updates(run)
        until(lambda: updates(run) > again + 50 or not learner.runs)

        assert learner.interrupt() == -signal.SIGINT
        kept.await_line("waiting for the learner of run cart", times=2)
        learner = command(*learning, *SMALL, "--learning-rate=1e-4")
        kept.await_line("run cart has other settings: actor 1 joins it again")
        kept.await_line("plays for run cart", times=3)
        assert learner.interrupt() == -signal.SIGINT
        assert [kept.interrupt(), replaced.interrupt()] == [-signal.SIGINT] * 2
        assert "actor 1 leaves the run" in kept.output
        assert "Traceback" not in kept.output + replaced.output + learner.output
        counts = [line["learner_updates"] for line in lines(run)]
    assert counts == sorted(counts)
    assert RunFolder(run).latest_checkpoint().state["learner"]["updates"] >= again


def test_a_follower_and_an_actor_without_a_run_end_at_ctrl_c(server: Server, tmp_path: Path) -> None:
    with (
        Command("evaluate", "--follow", "cart", folder=tmp_path) as follower,
        Command("actor", "--replay", server.address, "--run=cart", "--index=0", folder=tmp_path) as actor,
        Command("actor", "--replay", f"unix://{tmp_path}/none", "--index=0", folder=tmp_path) as early,
    ):
        follower.await_line("waiting for the first checkpoint of cart")
        actor.await_line("waiting for the learner of run cart")
        early.await_line(f"unix://{tmp_path}/none")
        assert [each.interrupt() for each in (follower, actor, early)] == [-signal.SIGINT] * 3


def test_seeds_are_those_of_innet_drl_train(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeding.py").write_text(SEEDING)
    monkeypatch.syspath_prepend(tmp_path)

    def seeds(name: str) -> list[int]:
        path = tmp_path / name
        return sorted(int(line) for line in path.read_text().split()) if path.exists() else []

    arguments = {"file": str(tmp_path / "one")}
    start.train(
        small(environment="seeding:make", environment_args=arguments, actors=2, seed=7, steps=500, video=False),
        tmp_path / "together",
    )
    learning = ["--out=apart", "--steps=500", "--seed=7", "--environment=seeding:make"]
    learning += [f"--environment-args=file={tmp_path / 'two'}", *SMALL, "--preset=vector"]
    with ExitStack() as stack:
        playing = [
            stack.enter_context(Command("actor", "--replay", server.address, f"--index={index}", folder=tmp_path))
            for index in (0, 1)
        ]
        for actor in playing:
            actor.await_line("waiting for a learner")
        # Games begin before the first step of the run, with which the seeds change.
        learner = stack.enter_context(
            Command("learner", "--replay", server.address, *learning, "--report-seconds=60", folder=tmp_path)
        )
        assert [process.end() for process in (learner, *playing)] == [0, 0, 0]
    # Evaluations have seeds of their own, which are equal in both.
    assert seeds("one") == seeds("two")


@contextmanager
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    """What runs a command at either end of a wire between two network namespaces: 10.79.0.1 and 10.79.0.2."""
    with ExitStack() as stack:
        pids = []
        for _ in range(2):
            hold = ["unshare", "--net", sys.executable, "-c", "print(flush=True); input()"]
            holder = stack.enter_context(
                subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(holder.kill)
            assert holder.stdout is not None
            holder.stdout.readline()
            pids.append(str(holder.pid))
        near, far = (["nsenter", f"--net=/proc/{pid}/ns/net", "--"] for pid in pids)
        set_up = [
            [*near, *f"ip link add name one type veth peer name two netns {pids[1]}".split()],
            *([*host, "ip", "link", "set", "lo", "up"] for host in (near, far)),
        ]
        for host, end, address in ((near, "one", "10.79.0.1/24"), (far, "two", "10.79.0.2/24")):
            set_up += [
                [*host, *f"ip address add {address} dev {end}".split()],
                [*host, *f"ip link set {end} up".split()],
            ]
        for command in set_up:
            subprocess.run(command, check=True)
        yield near, far


def test_an_actor_on_another_host(tmp_path: Path) -> None:
    """The hosts share nothing but the package."""
    if reason := namespaces_missing():
        pytest.skip(reason)
    address = "innet://10.79.0.1:7710"
    (tmp_path / "far").mkdir()
    with hosts() as (near, far), ExitStack() as stack:
        serve = [*near, *SERVE, "10.79.0.1:7710", "--trusted-network"]
        serving = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        stack.enter_context(serving)
        stack.callback(serving.kill)
        assert serving.stdout is not None
        assert " ready on " in serving.stdout.readline()
        playing = ["actor", "--replay", address, "--index=0"]
        actor = stack.enter_context(Command(*playing, folder=tmp_path / "far", inside=far))
        learning = ["learner", "--replay", address, "--out=cart", "--steps=600", *SMALL, "--actors=1"]
        learner = stack.enter_context(Command(*learning, folder=tmp_path, inside=near))
        assert learner.end() == 0
        assert actor.end() == 0
    assert lines(tmp_path / "cart")[-1]["agent_steps"] >= 600
