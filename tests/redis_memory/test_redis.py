"""Training over a real Redis, the baseline: the same run with the same metrics, and one clear error where it fails."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redis", reason="redis-py is not installed: pip install 'innet-drl[redis]'")

import brought
import redis
from redis_server import running
from training import lines, small

from benchmarks.systems import free_port
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.redis.memory import RedisMemory
from innet_drl.redis.store import RedisStore
from innet_drl.train.errors import ConfigurationError, ProcessError, ReplayMemoryError, RunFolderError
from innet_drl.train.memory import EmbeddedMemory, ReplayMemory, ServerMemory, memory_class
from innet_drl.train.observe.metrics import METRICS
from innet_drl.train.run_folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture
def address() -> Iterator[str]:
    port = free_port()
    with running(port):
        yield f"redis://127.0.0.1:{port}"


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_address_chooses_the_memory() -> None:
    # The type checker compares each with the interface.
    expected: dict[str, type[ReplayMemory]] = {
        "embedded": EmbeddedMemory,
        "innet://host:1": ServerMemory,
        "unix:///path": ServerMemory,
        "redis://host:1": RedisMemory,
    }
    assert {address: memory_class(address) for address in expected} == expected


@pytest.mark.parametrize("message", ["frames", "stacks"])
def test_a_run_on_a_redis_is_a_run_like_others(tmp_path: Path, address: str, message: Any) -> None:
    # Room for all steps, the rows that episodes end with, and what actors are ahead: nothing is evicted, so no update
    # comes too late.
    transitions = 40
    replay = f"{address}?message={message}&transitions={transitions}"
    config = small(replay=replay, actors=2, steps=3_000, capacity=20_000)
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 100
    last = lines(tmp_path / "run")[-1]
    assert {name.partition("/")[0] for name in last} <= METRICS.keys()
    assert any("parameter_lag" in line for line in lines(tmp_path / "run"))
    assert last["stale_updates"] == 0
    # The metrics have the ratio and the updates; what was inserted follows, but for the batches sampled ahead.
    sampled = config.batch_size * last["learner_updates"]
    wanted = config.samples_per_insert * (sampled / last["samples_per_insert"] - config.min_size)
    ahead = 2 * (config.prefetch + 3) * config.batch_size
    push = config.samples_per_insert * transitions
    # Messages are larger than the chunks that the settings' slack is for.
    messages = 2 * (config.actors * push - config.samples_per_insert * config.chunk_steps * config.all_environments)
    assert abs(sampled - wanted) <= config.slack + messages + push + ahead
    with redis.Redis.from_url(address) as client:
        assert client.keys("*") == [], "a run leaves nothing behind"


def test_a_run_goes_on_with_its_memory(tmp_path: Path, address: str) -> None:
    run = tmp_path / "run"
    first = start.train(small(replay=address, steps=800), run)
    before = lines(run)
    second = start.train(small(replay=address, steps=first.agent_steps + 400), run, resume=True)
    assert second.learner_updates > first.learner_updates
    # From its first line on; the memory may have been full.
    assert lines(run)[len(before)]["replay_steps"] >= before[-1]["replay_steps"]
    with pytest.raises(RunFolderError, match=r"replay\.snapshot to continue with an empty memory"):
        start.train(small(replay=f"{address}?message=stacks", steps=10_000), run, resume=True)
    # Rows are rows: the learner's own memory goes on with those that came by messages of frames.
    third = start.train(small(steps=second.agent_steps + 400), run, resume=True)
    assert third.learner_updates > second.learner_updates


def test_a_redis_that_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends with one error and a checkpoint, from which it continues when the Redis is back."""
    run, port = tmp_path / "run", free_port()
    flags = ["--replay", f"redis://127.0.0.1:{port}", "--report-seconds", "0.1", "--evaluation-games", "1"]
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--out", str(run), *flags]
    with running(port) as server:
        with subprocess.Popen(
            [*command, "--evaluation-period", "0", "--steps", "10000000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                if "learning" in line:
                    break
            server.kill()
            process.stdout.read()
            (error,) = process.stderr.read().strip().splitlines()
        assert process.returncode == 1
    assert f"127.0.0.1:{port}" in error
    assert "see that it runs" in error
    steps = RunFolder(run).latest_checkpoint().state["meter"]["agent_steps"]
    with running(port):
        assert main(["train", "--resume", str(run), "--steps", str(steps + 500), "--target-return", "1000"]) == 0


def test_a_redis_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    flags = ["train", "--preset", "cartpole", "--replay", f"redis://127.0.0.1:{port}", "--out", str(tmp_path / "run")]
    assert f"the Redis at redis://127.0.0.1:{port} does not answer" in error_of(flags, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("replay", "part"),
    [
        ("redis://127.0.0.1", "redis://host:port"),
        ("redis://127.0.0.1:x", "redis://host:port"),
        ("redis://:secret@127.0.0.1:1", "set INNET_TOKEN"),
        ("redis://127.0.0.1:1/zero", "number of a database"),
        ("redis://127.0.0.1:1?message=pickles", "message=frames or stacks"),
        ("redis://127.0.0.1:1?transitions=0", "transitions, at least 1"),
        ("redis://127.0.0.1:1?transition=9", "transitions, at least 1"),
    ],
)
def test_an_address_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], replay: str, part: str) -> None:
    message = error_of(["train", "--preset", "cartpole", "--replay", replay, "--out", str(tmp_path / "run")], capsys)
    assert part in message
    assert "secret" not in message


def test_a_serial_run_has_no_redis() -> None:
    with pytest.raises(ConfigurationError, match="serial run"):
        small(serial=True, replay="redis://127.0.0.1:1")


@pytest.mark.parametrize(("name", "value", "only"), [("learners", 2, 1), ("max_version_lag", 4, 0)])
def test_settings_that_a_redis_does_not_have(tmp_path: Path, name: str, value: int, only: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} {value}: it must be {only} with replay redis://"):
        start.train(small(replay="redis://127.0.0.1:1", **{name: value}), tmp_path / "run")


def test_games_that_are_reset_at_once(tmp_path: Path, address: str) -> None:
    arguments = {"mode": "SAME_STEP", "images": False}
    config = small(replay=address, environment=brought.make_vector, environment_args=arguments)
    with pytest.raises(ProcessError, match="this one has SAME_STEP: make it in the other mode"):
        start.train(config, tmp_path / "run")


def test_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    config = small(replay=f"redis://127.0.0.1:{port}", steps=400)
    with running(port, "--requirepass", "open sesame"):
        with pytest.raises(ReplayMemoryError, match="set INNET_TOKEN"):
            start.train(config, tmp_path / "run")
        monkeypatch.setenv("INNET_TOKEN", "open sesame")
        assert start.train(config, tmp_path / "run").learner_updates > 0


def test_keys_of_another_run(tmp_path: Path, address: str) -> None:
    with redis.Redis.from_url(address) as client:
        client.rpush("innet:run:experience", b"of another run")
    with pytest.raises(ConfigurationError, match=r"keys of another run named 'run'.*another folder"):
        start.train(small(replay=address), tmp_path / "run")


@pytest.mark.parametrize("message", ["frames", "stacks"])
def test_a_message_that_is_none(tmp_path: Path, address: str, message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else pushes to the run's list while it runs."""
    clear = RedisStore.clear

    def clear_and_push(self: RedisStore) -> None:
        clear(self)
        self._client.rpush(self._experience, b"hello")

    monkeypatch.setattr(RedisStore, "clear", clear_and_push)
    with pytest.raises(ReplayMemoryError, match=r"did not write \(a message"):
        start.train(small(replay=f"{address}?message={message}"), tmp_path / "run")


def test_parameters_of_another_network(address: str) -> None:
    config = small(replay=address)
    arrays = launch_parameters(config)
    one = RedisStore(address, "run", "", arrays)
    one.put_parameters(3, arrays)
    got = one.get_parameters(newer_than=2)
    assert got is not None
    assert got.version == 3
    assert all((got.tensors[name] == array).all() for name, array in arrays.items())
    assert one.get_parameters(newer_than=3) is None
    other = RedisStore(address, "run", "", launch_parameters(dataclasses.replace(config, hidden=64)))
    with pytest.raises(ReplayMemoryError, match="did not write"):
        other.get_parameters()
    one.close()
    other.close()


def launch_parameters(config: Any) -> Any:
    """The parameters of a fresh network."""
    from innet_drl.train import environments
    from innet_drl.train.networks import make_network, published

    arena = environments.make(config, 1)
    arrays = published(make_network(config, arena.spec), 7)
    arena.close()
    return arrays
