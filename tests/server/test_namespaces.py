"""Namespaces: programs with equal names share a server without meeting."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Command
from serving import SERVER_CLI, Server, served_memories
from steps import VIEW, fill, step, still_works, table
from training import newest, small

import innet_drl as innet
from innet_drl import errors
from innet_drl.launch import start
from innet_drl.launch.joining import Joining, join
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.published_run import RunPublisher

pytestmark = pytest.mark.timeout(110)

FLAGS = ["--preset=cartpole", "--environments=4", "--min-size=128", "--capacity=4000", "--batch-size=32"]
FLAGS += ["--layers=32", "--hidden=32", "--epsilon-anneal-steps=0", "--evaluation-games=3", "--evaluation-period=0"]
FLAGS += ["--no-video", "--report-seconds=0.2", "--target-return=None"]
"""Flags of a small run."""
INVALID = ["", "a/b", "with space", "é", "a" * 41]


@pytest.fixture(params=[1, 3])
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of one server, or of several that are one memory."""
    with served_memories(tmp_path, request.param) as addresses:
        yield addresses


@pytest.fixture
def both(address: str) -> Iterator[tuple[innet.Replay, innet.Replay]]:
    """Two programs with the same table."""
    with (
        innet.connect(address, tables=table(capacity=1200), namespace="one") as one,
        innet.connect(address, tables=table(capacity=1200), namespace="two") as two,
    ):
        yield one, two


def write(replay: innet.Replay, reward: float, name: str = "actor 0") -> None:
    with replay.writer("t", 1, VIEW, name=name) as writer:
        for t in range(40):
            writer.append(**{**step(t), "reward": np.full(1, reward, np.float32)})


def test_programs_of_equal_names_never_see_each_others_rewards(both: tuple[innet.Replay, innet.Replay]) -> None:
    for number, replay in enumerate(both, 1):
        # To each server of several.
        for actor in range(3):
            write(replay, number, f"actor {actor}")
        replay.put_parameters("policy", {"w": np.full(3, number, np.float32)})
    view = innet.Window(0, 0)
    for number, replay in enumerate(both, 1):
        seen = np.concatenate([replay.sample("t", 64, view).reward.ravel() for _ in range(10)])
        with replay.batches("t", 64, view) as batches:
            seen = np.append(seen, [next(batches).reward.ravel() for _ in range(10)])
        assert set(seen.tolist()) == {float(number)}
        newest = replay.get_parameters("policy")
        assert newest is not None
        assert (newest.version, newest.tensors["w"].tolist()) == (1, [number] * 3)


def test_every_call_has_the_names_inside(address: str, both: tuple[innet.Replay, innet.Replay]) -> None:
    one, two = both
    with innet.connect(address) as whole:
        writer = one.writer("t", 1, VIEW, name="actor 7")
        for t in range(40):
            writer.append(**step(t))
        writer.flush()
        one.put_parameters("policy", {"w": np.zeros(1, np.float32)})

        assert (list(one.tables()), one.tables()["t"], one.table("t")) == (["t"], *[table(capacity=1200)] * 2)
        assert list(whole.tables()) == ["one/t", "two/t"]
        assert (one.parameters(), two.parameters(), whole.parameters()) == ({"policy": 1}, {}, {"one/policy": 1})
        stats = one.stats()
        assert (list(stats["tables"]), list(stats["parameters"])) == (["t"], ["policy"])
        assert [each["name"] for each in stats["tables"]["t"]["by_writer"]] == ["actor 7"]
        assert stats["max_bytes"] == whole.stats()["max_bytes"]
        for shard in stats.get("shards", {}).values():
            assert (list(shard["tables"]), list(shard["parameters"])) == (["t"], ["policy"])
        of_server = whole.stats()["tables"]["one/t"]
        assert [each["name"] for each in of_server["by_writer"]] == ["one/actor 7"]
        assert of_server["items"] == stats["tables"]["t"]["items"] > 0

        batch = one.sample("t", 4, VIEW)
        assert one.update_priorities("t", batch.ids, np.ones(4)).stale == 0
        one.update_priorities("t", batch.ids, np.ones(4), wait=False)
        assert two.update_priorities("t", batch.ids, np.ones(4)).applied == 0
        assert one.get_parameters("policy", writer=writer) is not None
        writer.close()

        one.create_table(table("other"))
        assert list(whole.tables()) == ["one/other", "one/t", "two/t"]
        one.empty_table("t")
        assert one.stats()["tables"]["t"]["items"] == 0
        one.drop_table("t")
        one.drop_table("other")
        assert (list(one.tables()), list(two.tables()), list(whole.tables())) == ([], ["t"], ["two/t"])
        fill(two, 20)
        assert whole.stats()["tables"]["two/t"]["items"] > 0
        assert repr(one) == f"<Replay at {address.replace(',', ', ')}, namespace one>"


def test_errors_have_the_names_inside(both: tuple[innet.Replay, innet.Replay]) -> None:
    one, two = both
    two.create_table(table("secret"))
    with pytest.raises(errors.TableDiffersError, match=r'table "t" exists with another definition: capacity'):
        one.create_table(table(capacity=3000))
    with pytest.raises(errors.UnknownTableError, match=r'no table "secret"; in the namespace one there are "t"$'):
        one.sample("secret", 4, VIEW)
    for call in (one.table, one.empty_table, one.drop_table):
        with pytest.raises(errors.UnknownTableError, match=r'no table "u"; in the namespace one there are "t"$'):
            call("u")
    with pytest.raises(errors.UnknownTableError, match=r'no table "u"; in the namespace one there are "t"$'):
        one.update_priorities("u", np.ones(1, np.uint64), np.ones(1), wait=False)
        one.update_priorities("u", np.ones(1, np.uint64), np.ones(1))
    with pytest.raises(errors.DeadlineError) as late:
        one.sample("t", 4, VIEW, timeout=0.1)
    with one.batches("t", 4, VIEW, timeout=0.1) as batches, pytest.raises(errors.DeadlineError) as late_batch:
        next(batches)
    fill(one, 20)
    with pytest.raises(errors.ReplayError) as wide:
        one.sample("t", 4, innet.NStep(stack=5, n=9, observation="frame"))
    with pytest.raises(errors.ParametersError) as bad:
        one.put_parameters("p" * 150, {"w": np.zeros(1)})
    for raised in (late, late_batch, wide, bad):
        assert "one/" not in str(raised.value)
    assert 'table "t"' in str(wide.value)
    one.drop_table("t")
    with pytest.raises(errors.UnknownTableError, match="the namespace one has no tables: make it with"):
        one.table("t")
    with pytest.raises(errors.ParametersError, match="1 to 128 bytes"):
        one.put_parameters("", {"w": np.zeros(1)})
    with pytest.raises(errors.TableError, match="1 to 128 bytes, with its namespace"):
        one.create_table(table("t" * 126))


@pytest.mark.parametrize("address", [1], indirect=True)
def test_a_sample_that_waits_for_a_dropped_table_says_so(both: tuple[innet.Replay, innet.Replay]) -> None:
    one, two = both
    two.create_table(table("other"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.sample, "t", 4, VIEW, timeout=60)
        while one.stats()["tables"]["t"]["samples_wait_for"] is None:
            assert not waiting.done()
        one.drop_table("t")
        with pytest.raises(errors.UnknownTableError, match=r'no table "t"; it was dropped$'):
            waiting.result()


@pytest.mark.parametrize("address", [1], indirect=True)
@pytest.mark.parametrize("namespace", INVALID)
def test_a_namespace_of_other_characters_is_refused(address: str, namespace: str) -> None:
    with pytest.raises(errors.ConfigError, match=r"namespace .*: it has 1 to 40 characters"):
        innet.connect(address, namespace=namespace)


@pytest.mark.parametrize("address", [1], indirect=True)
def test_a_writer_with_old_parameters_waits_inside_too(address: str) -> None:
    with innet.connect(address, tables=table(max_version_lag=1), namespace="run-7") as replay:
        parameters = {"w": np.zeros(1, np.float32)}
        replay.put_parameters("policy", parameters)
        with replay.writer("t", 1, VIEW, chunk_steps=1) as writer:
            assert replay.get_parameters("policy", writer=writer) is not None
            for _ in range(3):
                replay.put_parameters("policy", parameters)
            with pytest.raises(errors.DeadlineError) as late:
                for t in range(40):
                    writer.append(**step(t), timeout=0.1)
                writer.flush(timeout=0.1)
            assert "policy" in str(late.value)
            assert "run-7" not in str(late.value)
            assert replay.get_parameters("policy", newer_than=1, writer=writer) is not None
            writer.flush(timeout=10)


def test_jobs_of_equal_names_sum_apart() -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        with (
            innet.connect(server.addresses[0], namespace="one") as one,
            innet.connect(server.addresses[0], namespace="two") as two,
            one.join_gradients("job", 0, 1) as first,
            two.join_gradients("job", 0, 1) as second,
        ):
            for worker, value in ((first, 1.0), (second, 2.0)):
                values = np.full(1000, value, np.float32)
                assert worker.sum(values) == 1
                assert set(values.tolist()) == {value}
            assert [list(each.stats()["gradients"]["jobs"]) for each in (one, two)] == [["job"], ["job"]]
            with innet.connect(server.addresses[0]) as whole:
                assert sorted(whole.stats()["gradients"]["jobs"]) == ["one/job", "two/job"]
            with pytest.raises(errors.ReplayError) as refused:
                one.join_gradients("job", 0, 2)
            assert "one/" not in str(refused.value)


def test_a_server_that_was_started_again_gets_the_tables_inside(tmp_path: Path) -> None:
    with Server(f"unix://{tmp_path}/s") as server:
        with innet.connect(server.address, tables=table(), namespace="run-7") as replay:
            assert still_works(replay)
            server.kill()
            server.start()
            assert list(replay.tables()) == ["t"]
            assert still_works(replay)
        with innet.connect(server.address) as whole:
            assert list(whole.tables()) == ["run-7/t"]


def test_lists_of_servers_may_share_some(tmp_path: Path) -> None:
    """Servers of one memory are compared within the namespace."""
    with ExitStack() as stack:
        addresses = []
        for number in range(3):
            memory = stack.enter_context(innet.Memory())
            addresses += stack.enter_context(memory.serve(f"unix://{tmp_path}/{number}")).addresses
        for namespace, of_run in (("one", addresses[:2]), ("two", addresses[1:])):
            with innet.connect(",".join(of_run), tables=table(capacity=300), namespace=namespace) as replay:
                assert still_works(replay)
        # Each finds its own table again.
        with innet.connect(",".join(addresses[:2]), namespace="one") as replay:
            assert list(replay.tables()) == ["t"]
        with innet.connect(addresses[0]) as first:
            assert list(first.tables()) == ["one/t"]


def test_commands_have_the_names_inside(tmp_path: Path) -> None:
    def command(*arguments: str) -> str:
        done = subprocess.run([*SERVER_CLI, *arguments], stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    with Server(f"unix://{tmp_path}/s") as server:
        for namespace in ("one", "two"):
            with innet.connect(server.address, tables=table(), namespace=namespace) as replay:
                fill(replay, 20)
        inside = ("--namespace", "one", server.address)
        listed = command("tables", server.address).splitlines()
        assert [line.split()[0] for line in listed] == ["one/t", "two/t"]
        assert command("tables", *inside).split()[0] == "t"
        assert list(json.loads(command("stats", "--json", *inside))["tables"]) == ["t"]
        command("drop", "t", *inside)
        assert command("tables", server.address).split()[0] == "two/t"
        refused = subprocess.run(
            [*SERVER_CLI, "tables", "--namespace", "a/b", server.address], stderr=subprocess.PIPE, text=True
        )
        assert refused.returncode == 2
        assert "it has 1 to 40 characters" in refused.stderr


DOUBLED = """
import gymnasium


class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 2 * reward
"""


def reward(run: Path) -> float:
    """The reward of a step, from what the run's actors reported: a sample would wait for the replay ratio."""
    last = newest(run)
    return float(last["return_mean"] / last["length_mean"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_runs_of_one_name_train_at_one_server(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two/doubled.py").write_text(DOUBLED)
    with Server("innet://127.0.0.1:0") as server, ExitStack() as stack:

        def command(folder: str, *arguments: str) -> Command:
            return stack.enter_context(Command(*arguments, folder=tmp_path / folder))

        replay = ["--replay", server.address]
        first = command("one", "train", *replay, "--namespace=one", "--out=cart", "--actors=1", "--steps=1000", *FLAGS)
        second = [
            command("two", "actor", *replay, "--namespace=two", "--index=0"),
            # It joins the only run that is published for actors.
            command("two", "actor", *replay, "--index=1"),
            command("two", "evaluate", "--follow", "cart", "--namespace=two"),
            command("two", "evaluate", "--follow", "cart", "--namespace=one"),
            command(
                "two",
                "learner",
                *replay,
                "--namespace=two",
                "--out=cart",
                "--actors=2",
                "--steps=2000",
                "--environment-wrappers=doubled:Doubled",
                *FLAGS,
            ),
        ]
        assert (first.end(), [process.end() for process in second]) == (0, [0, 0, 0, 1, 0]), [
            process.output for process in (first, *second)
        ]
        assert "--namespace one: the run of cart has the namespace two" in second[3].output
        assert all("plays for run cart at" in process.output for process in second[:2])
        assert (reward(tmp_path / "one/cart"), reward(tmp_path / "two/cart")) == (1.0, 2.0)
        with innet.connect(server.address) as whole:
            before = whole.stats()["tables"]
            assert before.keys() == {"one/cart", "one/cart/reports", "two/cart", "two/cart/reports"}
            # The actors of a quick machine take more steps than the run asks for before they hear of its end.
            taken = json.loads((tmp_path / "one/cart/evaluation.json").read_text())["agent_steps"]
            again = command("one", "train", "--resume=cart", f"--steps={taken + 500}")
            assert again.end() == 0, again.output
            after = whole.stats()["tables"]
        assert after.keys() == before.keys()
        assert after["one/cart"]["inserted_steps"] >= before["one/cart"]["inserted_steps"] + 400
        assert after["two/cart"]["inserted_steps"] == before["two/cart"]["inserted_steps"]
        assert reward(tmp_path / "one/cart") == 1.0


def publish(address: str, name: str, **changes: Any) -> None:
    with RunPublisher.connect(name, small(replay=address, **changes), "") as run:
        run.publish(0)


@pytest.mark.parametrize("address", [1], indirect=True)
def test_an_actor_names_one_of_several_runs_by_its_namespace(address: str) -> None:
    publish(address, "cart", namespace="one", actors=2)
    # Without any, the only run.
    with pytest.raises(ConfigurationError, match="index 9: run one/cart has 2 actors"):
        join(Joining(address, 9))
    publish(address, "cart", namespace="two", actors=3)
    publish(address, "cart", actors=4)
    with pytest.raises(
        ConfigurationError, match=r"has several runs, cart, one/cart, two/cart: name the actor's by --run, or by name"
    ):
        join(Joining(address, 0))
    for joining, run in (
        (Joining(address, 9, namespace="two"), "cart has 3 actors"),
        (Joining(address, 9, run="cart", namespace="one"), "cart has 2 actors"),
        (Joining(address, 9, run="one/cart"), "one/cart has 2 actors"),
        (Joining(address, 9, run="cart"), "cart has 4 actors"),
    ):
        with pytest.raises(ConfigurationError, match=f"index 9: run {run}"):
            join(joining)


@pytest.mark.parametrize("address", [1], indirect=True)
def test_a_run_of_a_taken_name_is_advised_to_have_a_namespace(address: str, tmp_path: Path) -> None:
    config = small(replay=address, steps=400)
    start.train(config, tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"memory of another run named 'run'.*choose a namespace of its own"):
        start.train(config, tmp_path / "other/run")
    result = start.train(dataclasses.replace(config, namespace="other"), tmp_path / "other/run")
    assert result.learner_updates > 0


@pytest.mark.parametrize("namespace", INVALID[1:])
def test_the_namespace_of_a_run_has_the_same_characters(namespace: str) -> None:
    with pytest.raises(ConfigurationError, match=r"namespace.*up to 40 ASCII letters"):
        small(replay="innet://a:1", namespace=namespace)


def test_a_run_without_a_server_has_no_namespace() -> None:
    with pytest.raises(ConfigurationError, match=r"namespace.*empty without a server"):
        small(namespace="run-7")
