"""Versions of sampled items, and `max_sample_lag`: in process, served, over two servers, after a restart."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import Server, served_memories

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

LAG = 2
ROWS = innet.Window(0, 0)
SNAPSHOT = "memory.snapshot"


def table(name: str = "t", **settings: Any) -> innet.Table:
    settings = {"parameters": "policy", "max_sample_lag": LAG, "view": ROWS, **settings}
    return innet.Table(name, {"step": "int64"}, 1000, **settings)


def publish(replay: innet.Replay, versions: int, name: str = "policy") -> int:
    return [replay.put_parameters(name, {"w": np.ones(3, np.float32)}) for _ in range(versions)][-1]


def step(number: int, version: int | None = None) -> dict[str, Any]:
    return {"step": [number], "terminated": [False], "truncated": [False], "version": version}


def write(replay: innet.Replay, versions: list[int], name: str = "t", server: int = 0) -> None:
    """A step of each version, whose number is the version, by `append`."""
    with replay.writer(name, 1, server=server) as writer:
        for version in versions:
            writer.append(**step(version, version))


def stats(replay: innet.Replay, name: str = "t") -> dict[str, Any]:
    found: dict[str, Any] = replay.stats()["tables"][name]
    return found


@pytest.fixture(params=["in process", "served", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory(seed=5) as memory:
            yield memory
        return
    with served_memories(tmp_path, 2 if "two" in request.param else 1) as address, innet.connect(address) as client:
        yield client


def test_a_step_has_the_version_that_its_writer_got(replay: innet.Replay) -> None:
    replay.create_table(table(max_sample_lag=0))
    with replay.writer("t", 1, server=1) as writer, replay.writer("t", 1, server=0) as other:
        writer.append(**step(0))
        # Without parameters there is no version.
        assert replay.get_parameters("policy", writer=writer) is None
        writer.append(**step(0))
        newest = publish(replay, 3)
        writer.append(**step(0))
        assert replay.get_parameters("policy", writer=writer) is not None
        writer.append(**step(3))
        # Nothing newer: the writer has what the caller has.
        assert replay.get_parameters("policy", newest, writer=writer) is None
        writer.append(**step(3))
        writer.append(**step(1, version=1))
        block: dict[str, Any] = {"step": [[2], [2]], "terminated": [[False]] * 2, "truncated": [[False]] * 2}
        writer.extend(**block, version=2)
        # The version of one call is not that of the next one.
        writer.append(**step(3))
        publish(replay, 1)
        publish(replay, 7, "other")
        assert replay.get_parameters("other", writer=writer) is not None
        writer.append(**step(3))
        assert replay.get_parameters("policy", writer=writer) is not None
        writer.append(**step(4))
        other.append(**step(0))
    batch = replay.sample("t", 240)
    assert batch.versions.dtype == np.uint64
    np.testing.assert_array_equal(batch.versions, batch.step[:, 0])
    assert set(batch.versions.tolist()) == {0, 1, 2, 3, 4}
    assert list(batch)[-2:] == ["ages", "versions"]
    again = pickle.loads(pickle.dumps(batch[:7]))
    np.testing.assert_array_equal(again.versions, batch.versions[:7])
    lags = stats(replay)["sample_lag"]
    known = batch.versions[batch.versions > 0].astype(int)
    assert (lags["count"], lags["sum"]) == (len(known), (4 - known).sum())


def test_items_of_old_versions_leave_and_the_others_are_sampled(replay: innet.Replay) -> None:
    replay.create_table(table())
    # By far more than a chunk: the writers take both servers.
    for server in (0, 1):
        write(replay, [version for version in (1, 2, 3, 4, 5, 0) for _ in range(5)], server=server)
    # Parameters are not known yet.
    assert set(replay.sample("t", 200).versions.tolist()) == {0, 1, 2, 3, 4, 5}
    publish(replay, 5)
    for _ in range(5):
        batch = replay.sample("t", 200)
        assert set(batch.versions.tolist()) == {0, 3, 4, 5}
        np.testing.assert_array_equal(batch.versions, batch.step[:, 0])
    now = stats(replay)
    assert (now["expired_items"], now["items"], now["evicted_items"], now["max_sample_lag"]) == (20, 40, 0, LAG)
    np.testing.assert_allclose(batch.probabilities, 1 / 40)
    publish(replay, 3)
    with replay.batches("t", 50, prefetch=0) as batches:
        assert set(next(batches).versions.tolist()) == {0}
        # Only steps of unknown parameters are left, until there are new ones.
        write(replay, [8] * 30)
        assert set(next(batches).versions.tolist()) == {0, 8}


@pytest.mark.parametrize("make_replay", ["process", "unix"], indirect=True)
def test_a_queue_gives_what_is_young_enough(make_replay: MakeReplay) -> None:
    replay = make_replay([table(sampler="fifo", max_times_sampled=1)])
    write(replay, [1, 1, 4, 2, 5, 0, 1, 3])
    publish(replay, 5)
    assert replay.sample("t", 4).versions.tolist() == [4, 5, 0, 3]
    assert (stats(replay)["expired_items"], stats(replay)["items"]) == (4, 0)
    write(replay, [1])
    with pytest.raises(errors.DeadlineError, match=r"5 items have expired so far, more than max_sample_lag 2 versions"):
        replay.sample("t", 1, timeout=0.2)


def test_a_mix_has_versions_where_a_table_names_parameters(replay: innet.Replay) -> None:
    replay.create_table(table("plain", parameters=None, max_sample_lag=0))
    replay.create_table(table())
    write(replay, [3, 1], server=1)
    with replay.writer("plain", 1) as writer:
        writer.append(**step(0))
    publish(replay, 3)
    for names in (["plain", "t"], ["t", "plain"]):
        batch = replay.sample(innet.Mix(dict.fromkeys(names, 0.5)), 40)
        of_table = batch.tables == names.index("t")
        assert of_table.sum() == 20
        np.testing.assert_array_equal(batch.versions, np.where(of_table, batch.step[:, 0], 0))
    assert "versions" not in replay.sample("plain", 4)


def test_tensors_have_versions() -> None:
    with innet.Memory([table()]) as replay:
        write(replay, [3, 0, 4])
        publish(replay, 4)
        batch = replay.sample("t", 12, device="cpu")
        assert batch.versions.dtype == torch.uint64
        assert sorted(set(batch.versions.tolist())) == [0, 3, 4]


def test_definitions_and_versions_are_checked() -> None:
    with pytest.raises(errors.TableError, match=r"max_sample_lag 2 counts versions of parameters: name them"):
        table(parameters=None)
    with pytest.raises(errors.ConfigError, match="max_sample_lag is an integer from 0 to 4294967295"):
        table(max_sample_lag=-1)
    with pytest.raises(TypeError, match="parameters is a text"):
        table(parameters=3)
    for name in ("version", "versions"):
        with pytest.raises(errors.TableError, match=f'column "{name}" has the name of an argument of append'):
            innet.Table("t", {name: "int64"}, 10, parameters="policy")
        with innet.Memory([innet.Table("t", {name: "int64"}, 100, view=ROWS)]) as replay:
            with replay.writer("t", 1) as writer:
                row: dict[str, Any] = {name: [7], "terminated": [False], "truncated": [False]}
                writer.append(**row)
            assert replay.sample("t", 2)[name].ravel().tolist() == [7, 7]
    with innet.Memory([table(), table("plain", parameters=None, max_sample_lag=0)]) as replay:
        assert replay.tables()["t"] == table()
        other = r'parameters is "policy", asked for "other"; max_sample_lag is 2, asked for 3'
        with pytest.raises(errors.TableError, match=other):
            replay.create_table(table(parameters="other", max_sample_lag=3))
        with replay.writer("plain", 1) as writer:
            with pytest.raises(errors.SchemaError, match="version 4 of parameters, and the table names none"):
                writer.append(**step(0, version=4))
            with pytest.raises(errors.ConfigError, match="version is an integer from 0 to"):
                writer.append(**step(0, version=-4))
            with pytest.raises(TypeError, match="version is an integer, got a str"):
                writer.append(**step(0) | {"version": "4"})
            assert writer.steps == 0


def test_a_namespace_has_parameters_of_its_own(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        with (
            innet.connect(address, tables=table(), namespace="one") as one,
            innet.connect(address, tables=table(), namespace="two") as two,
            innet.connect(address) as all_names,
        ):
            publish(two, 9)
            publish(one, 1)
            write(one, [1])
            assert one.sample("t", 1).versions.tolist() == [1]
            assert one.tables() == {"t": table()} == two.tables()
            assert all_names.tables()["one/t"] == table("one/t", parameters="one/policy")
            publish(one, 3)
            with pytest.raises(errors.DeadlineError):
                one.sample("t", 1, timeout=0.1)


def test_versions_survive_a_restart_of_the_program(tmp_path: Path) -> None:
    with innet.Memory([table()]) as memory:
        newest = publish(memory, 57)
        write(memory, [56, 55, 0])
        assert set(memory.sample("t", 9).versions.tolist()) == {0, 55, 56}
        lags = stats(memory)["sample_lag"]
        memory.save(tmp_path / SNAPSHOT)
    with innet.Memory() as memory:
        memory.restore(tmp_path / SNAPSHOT)
        assert memory.get_parameters("policy") is None
        assert stats(memory)["sample_lag"] == lags
        assert set(memory.sample("t", 9).versions.tolist()) == {0, 55, 56}
        assert publish(memory, 1) == newest + 1
        assert set(memory.sample("t", 9).versions.tolist()) == {0, 56}
        assert stats(memory)["expired_items"] == 1


def test_versions_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    address, folder = f"unix://{tmp_path}/s", tmp_path / "snapshots"
    with Server(address, f"--snapshot={folder}", "--snapshot-every=0s") as server:
        with innet.connect(server.address, tables=table()) as replay:
            publish(replay, 57)
            with replay.writer("t", 1) as writer:
                assert replay.get_parameters("policy", writer=writer) is not None
                writer.append(**step(57))
                writer.append(**step(56, 56))
                writer.flush()
                server.send(signal.SIGTERM)
                server.wait()
                server.start()
                # The writer goes on with its version.
                writer.append(**step(57))
            batch = replay.sample("t", 30)
            np.testing.assert_array_equal(batch.versions, batch.step[:, 0])
            assert publish(replay, 2) == 59
            assert set(replay.sample("t", 30).versions.tolist()) == {57}
            assert stats(replay)["expired_items"] == 1
