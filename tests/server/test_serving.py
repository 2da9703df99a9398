"""One memory for several processes: forked and spawned children, serving, tokens, logs."""

from __future__ import annotations

import gc
import logging
import multiprocessing
from typing import Any

import numpy as np
import pytest
from serving import until
from steps import VIEW, connect_and_fill, fill, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors


def use_in_child(replay: innet.Replay, failures: Any) -> None:
    try:
        replay.stats()
    except errors.ForkError as error:
        failures.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_to_connect_itself(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fork = multiprocessing.get_context("fork")
    failures = fork.Queue()
    child = fork.Process(target=use_in_child, args=(replay, failures))
    child.start()
    assert "spawn" in failures.get(timeout=30)
    child.join(30)
    assert child.exitcode == 0
    # The parent's own use continues.
    fill(replay, 20)
    assert len(replay.sample("t", 4, VIEW, timeout=5)) == 4


def test_spawned_children_connect_to_their_parent(tmp_path: Any) -> None:
    spawn = multiprocessing.get_context("spawn")
    with innet.Memory([table()]) as replay, replay.serve(f"unix://{tmp_path}/s") as server:
        child = spawn.Process(target=connect_and_fill, args=(server.addresses[0],))
        child.start()
        assert len(replay.sample("t", 8, VIEW, timeout=60)) == 8
        child.join(30)
        assert child.exitcode == 0


def test_a_server_goes_on_while_its_memory_lives(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    address = f"unix://{tmp_path}/s"
    memory = innet.Memory([table()])
    memory.serve(address)
    gc.collect()
    with innet.connect(address) as client:
        assert client.table("t") == table()
    memory.close()
    with pytest.raises(errors.ConnectError):
        innet.connect(address, timeout=0)
    # Or while the server's own object does.
    server = innet.Memory([table()]).serve(address)
    gc.collect()
    with innet.connect(address) as client:
        assert client.table("t") == table()
    assert not caplog.records
    del server
    gc.collect()
    assert "the server ends" in caplog.text
    with pytest.raises(errors.ConnectError):
        innet.connect(address, timeout=0)


def test_a_server_with_a_token_refuses_others(tmp_path: Any) -> None:
    with innet.Memory([table()]) as replay:
        with replay.serve(["innet://127.0.0.1:0", f"unix://{tmp_path}/s"], token="secret of the tests") as server:
            assert len(server.addresses) == 2
            for address in server.addresses:
                with innet.connect(address, token="secret of the tests") as client:
                    assert client.table("t") == table()
                for wrong in (None, "a guess of a stranger"):
                    with pytest.raises(errors.AuthenticationError):
                        innet.connect(address, token=wrong)
        assert "closed" in repr(server)
        with pytest.raises(errors.ConnectError) as caught:
            innet.connect(server.addresses[0], token="secret of the tests", timeout=2)
        assert isinstance(caught.value, ConnectionError)


def test_each_roles_token_allows_its_requests(tmp_path: Any) -> None:
    of_operator, of_learner, of_actor = "token of the operator", "token of the learners", "token of the actors"
    with (
        innet.Memory([table()]) as memory,
        memory.serve(
            f"unix://{tmp_path}/s", token=of_operator, learner_token=of_learner, actor_token=of_actor
        ) as server,
    ):
        address = server.addresses[0]
        with (
            innet.connect(address, token=of_actor, tables=[table()]) as actor,
            innet.connect(address, token=of_learner) as learner,
            innet.connect(address, token=of_operator) as operator,
        ):
            fill(actor, 20)
            learner.put_parameters("policy", {"w": np.zeros(3, np.float32)})
            assert actor.get_parameters("policy") is not None
            batch = learner.sample("t", 4, VIEW, timeout=60)
            learner.update_priorities("t", batch.ids, np.ones(4))
            for refused in (
                lambda: actor.sample("t", 4, VIEW, timeout=60),
                lambda: actor.update_priorities("t", batch.ids, np.ones(4)),
                lambda: actor.put_parameters("policy", {"w": np.zeros(3, np.float32)}),
                lambda: actor.create_table(table("other")),
            ):
                with pytest.raises(errors.ForbiddenError, match=r"actor token .*--learner-token-file"):
                    refused()
            for client in (actor, learner):
                with pytest.raises(errors.ForbiddenError, match=r"may not drop_table: .*--token-file"):
                    client.drop_table("t")
                with pytest.raises(PermissionError, match="may not empty_table"):
                    client.empty_table("t")
            operator.drop_table("t")


def test_a_short_token_is_refused_at_both_ends(tmp_path: Any) -> None:
    address = f"unix://{tmp_path}/s"
    with innet.Memory() as memory:
        with pytest.raises(errors.ConfigError, match=r"at least 16 bytes.*openssl rand"):
            memory.serve(address, token="short")
        with pytest.raises(errors.ConfigError, match=r"actor_token: .*at least 16 bytes.*openssl rand"):
            memory.serve(address, actor_token="short")
    with pytest.raises(errors.ConfigError, match=r"at least 16 bytes.*openssl rand"):
        innet.connect(address, token="short")


def test_the_environments_token_is_taken_where_none_is_given(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with innet.Memory() as replay, replay.serve(f"unix://{tmp_path}/guarded", token="secret of the tests") as guarded:
        with replay.serve(f"unix://{tmp_path}/open") as unguarded:
            for empty in (None, "", " "):
                if empty is not None:
                    monkeypatch.setenv("INNET_TOKEN", empty)
                innet.connect(unguarded.addresses[0]).close()
                with pytest.raises(errors.AuthenticationError, match="set the environment variable INNET_TOKEN"):
                    innet.connect(guarded.addresses[0])
            monkeypatch.setenv("INNET_TOKEN", "secret of the tests\n")
            innet.connect(guarded.addresses[0]).close()
            innet.connect(unguarded.addresses[0], token="").close()
            with pytest.raises(errors.AuthenticationError, match="unset INNET_TOKEN"):
                innet.connect(unguarded.addresses[0])
            with pytest.raises(errors.AuthenticationError, match="another token"):
                innet.connect(guarded.addresses[0], token="a guess of a stranger")


def test_serving_is_for_a_memory_of_this_process(make_replay: MakeReplay, tmp_path: Any) -> None:
    replay = make_replay()
    if isinstance(replay, innet.Memory):
        with replay.serve(f"unix://{tmp_path}/again") as server:
            assert server.addresses == [f"unix://{tmp_path}/again"]
    else:
        assert repr(replay).startswith("<Replay at ")
        assert not {"save", "restore", "serve"} & set(dir(replay))


def test_a_server_logs_to_the_loggers_of_python(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="innet_drl"), innet.Memory([table()]) as replay:
        replay.serve("innet://127.0.0.1:0").close()
    assert "listening" in caplog.text


def test_served_floats_are_those_of_the_memory() -> None:
    random = np.random.default_rng(0)
    with (
        innet.Memory([table(priority_exponent=0.6)]) as memory,
        memory.serve("innet://127.0.0.1:0") as server,
        innet.connect(server.addresses[0]) as client,
    ):
        fill(client, 50)
        for _ in range(100):
            batch = client.sample("t", 32, VIEW)
            client.update_priorities("t", batch.ids, random.random(32))
            served, own = (replay.stats()["tables"]["t"] for replay in (client, memory))
            # Without a reader that rounds correctly, one in some is off by its last bit.
            assert (served["total_mass"], served["max_priority"]) == (own["total_mass"], own["max_priority"])


def test_a_servers_deadline_is_reported_once() -> None:
    with innet.Memory([table(min_size=1)]) as replay, replay.serve("innet://127.0.0.1:0") as server:
        client = innet.connect(server.addresses[0])
        with (
            client,
            client.batches("t", 1, VIEW, timeout=0.5) as batches,
            pytest.raises(errors.DeadlineError) as caught,
        ):
            next(batches)
    assert str(caught.value).count("the deadline passed") == 1


def connections(replay: innet.Replay) -> int:
    open_now: int = replay.stats()["server"]["connections"]
    return open_now


@pytest.mark.parametrize("address", ["unix://{}/s", "innet://127.0.0.1:0"])
def test_batches_end_without_an_error_of_the_server(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    """Although batches that were sampled ahead are on their way. Lines about connections are for DEBUG."""
    caplog.set_level(logging.DEBUG, "innet_drl")
    with innet.Memory([table()]) as memory, memory.serve(address.format(tmp_path)) as server:
        fill(memory, 20)
        with innet.connect(server.addresses[0]) as replay:
            before = connections(replay)
            with replay.batches("t", 64, VIEW, prefetch=8) as batches:
                next(batches)
                assert connections(replay) > before
            while connections(replay) > before:
                pass
            assert replay.stats()["server"]["errors"] == 0
    # A thread of its own delivers the log.
    until(lambda: any(record.getMessage() == "connection closed" for record in caplog.records))
    of_connections = [record for record in caplog.records if "connection" in record.getMessage()]
    assert not [record.getMessage() for record in of_connections if "broken" in record.getMessage()]
    assert {record.levelno for record in of_connections} == {logging.DEBUG}
