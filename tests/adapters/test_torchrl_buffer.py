"""TensorDicts in and out of a memory that several processes share."""

from __future__ import annotations

import _thread
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from order import BATCHES, check_every_place
from scipy import stats
from serving import Server, served_memories, until
from tensordict import TensorDict

import innet_drl as innet
from innet_drl import errors
from innet_drl.torchrl import InnetReplayBuffer

ITEMS = 60
_SPAWN = multiprocessing.get_context("spawn")


def items(first: int = 0, count: int = ITEMS) -> TensorDict:
    """Transitions as TorchRL's collectors make them, which tell their numbers."""
    number = torch.arange(first, first + count)
    camera = (number[:, None, None, None] + torch.arange(12 * 10).reshape(1, 12, 10)).to(torch.uint8)
    after = {
        "observation": TensorDict({"camera": camera + 1, "arm": number[:, None] * torch.ones(3)}, [count]),
        "reward": number[:, None].float() / 7,
        "done": (number % 5 == 0)[:, None],
    }
    now = {"observation": TensorDict({"camera": camera, "arm": torch.zeros(count, 3)}, [count])}
    return TensorDict({**now, "action": number, "next": TensorDict(after, [count])}, [count])


@pytest.fixture(params=["in process", "served", "on two servers"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InnetReplayBuffer]:
    settings: dict[str, Any] = {"batch_size": 32, "alpha": 0.7, "beta": 0.5, "timeout": 20.0}
    if request.param == "in process":
        yield InnetReplayBuffer(1_000, **settings)
        return
    with served_memories(tmp_path, 1 if request.param == "served" else 2) as address:
        buffer = InnetReplayBuffer(1_000, address=address, **settings)
        yield buffer
        buffer.replay.close()


def test_sampled_items_are_those_that_were_added(buffer: InnetReplayBuffer) -> None:
    data = items()
    buffer.extend(data[:40])
    buffer.extend([data[number] for number in range(40, 50)])
    for number in range(50, ITEMS):
        buffer.add(data[number])
    assert len(buffer) == buffer.write_count == ITEMS
    assert buffer.stats()["by_writer"][0]["name"] == f"collector {socket.gethostname()} {os.getpid()}"
    seen: set[int] = set()
    for _ in range(20):
        sampled = buffer.sample()
        expected = data[sampled["action"]]
        assert sampled.batch_size == (32,)
        entries = {"index", "priority_weight"} | set(expected.keys())
        assert set(sampled.keys()) == entries
        for path, value in expected.items(include_nested=True, leaves_only=True):
            torch.testing.assert_close(sampled.get(path), value, rtol=0, atol=0)
        seen.update(sampled["action"].tolist())
    assert len(seen) > 50
    # A batch is the learner's own.
    sampled["td_error"] = torch.ones(32)
    sampled["next", "reward"] += 1.0
    buffer.empty()
    assert len(buffer) == 0


def test_frequencies_and_weights_are_those_of_the_priorities(buffer: InnetReplayBuffer) -> None:
    priorities = np.linspace(0.1, 4.0, ITEMS)
    data = items()
    # Half of them from the beginning, half by an update.
    data["td_error"] = torch.from_numpy(priorities).float()[:, None]
    data["td_error"][30:] = 1.0
    buffer.extend(data)
    for sampled in (buffer.sample(256) for _ in range(4)):
        late = sampled[sampled["action"] >= 30]
        late["td_error"] = torch.from_numpy(priorities[late["action"]])[:, None]
        buffer.update_tensordict_priority(late)
    batches = [buffer.sample() for _ in range(1_500)]
    drawn = np.concatenate([batch["action"].numpy() for batch in batches])
    mass = priorities**0.7 / (priorities**0.7).sum()
    assert stats.chisquare(np.bincount(drawn, minlength=ITEMS), mass * len(drawn)).pvalue > 1e-8
    weight = (mass[batches[0]["action"]] * ITEMS) ** -0.5
    np.testing.assert_allclose(batches[0]["priority_weight"], weight / weight.max(), rtol=1e-3)


def test_a_part_of_a_batch_is_as_good_as_the_whole(buffer: InnetReplayBuffer) -> None:
    buffer.extend(items())
    check_every_place([buffer.sample()["action"] for _ in range(BATCHES)], ITEMS)


def collect(buffer: InnetReplayBuffer, first: int, blocks: int) -> None:
    for number in range(blocks):
        buffer.extend(items(first + number, 1))
        # Slowly enough for one to be killed in the middle.
        time.sleep(0.01)


@pytest.mark.slow
def test_a_learner_that_begins_first_has_the_items_of_all_collectors_also_of_a_killed_one(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        buffer = InnetReplayBuffer(1_000, address=address, batch_size=16)
        collectors = [
            _SPAWN.Process(target=collect, args=(buffer, first, blocks), daemon=True)
            for first, blocks in ((0, 50), (100, 50), (200, 100_000))
        ]
        for collector in collectors:
            collector.start()
        # Waits for the first of them.
        assert buffer.sample().batch_size == (16,)
        for collector in collectors[:2]:
            collector.join(60)
        until(lambda: buffer.write_count >= 110)
        collectors[2].kill()
        collectors[2].join()
        seen = {int(number) for _ in range(40) for number in buffer.sample()["action"] // 100}
        assert seen >= {0, 1, 2}
        buffer.replay.close()


def test_collectors_may_have_their_entries_in_another_order(tmp_path: Path) -> None:
    """TorchRL's do: an actor's entries are in the order of a set of texts."""
    with served_memories(tmp_path, 1) as address:
        for first, second in (("left", "right"), ("right", "left")):
            buffer = InnetReplayBuffer(1_000, batch_size=32, address=address, timeout=20.0)
            values = {name: torch.full((8,), len(name)) for name in (first, second)}
            buffer.extend(TensorDict({"next": TensorDict(values, [8]), **values}, [8]))
        sampled = buffer.sample()
        for path in ("left", "right", ("next", "left"), ("next", "right")):
            assert (sampled[path] == len(path if isinstance(path, str) else path[1])).all()


def test_it_goes_on_after_a_server_was_restarted_without_its_items(tmp_path: Path) -> None:
    with Server(f"unix://{tmp_path}/server") as server:
        collector, learner = (InnetReplayBuffer(1_000, address=server.address, batch_size=8) for _ in range(2))
        collector.extend(items())
        learner.sample()
    with Server(f"unix://{tmp_path}/server"):
        collector.extend(items(100, 10))
        assert int(learner.sample()["action"].min()) >= 100
        assert len(learner) == 10
        collector.close()
        learner.close()


def test_items_that_are_not_yet_confirmed_are_told_as_taken(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        buffer = InnetReplayBuffer(10_000, address=address, samples_per_insert=2.0, timeout=0.5)
        with pytest.raises(errors.DeadlineError, match="3000 items are taken, and follow: do not add them again"):
            buffer.extend(items(0, 3_000))
        while buffer.write_count < 3_000:
            buffer.sample(256)
        buffer.timeout = 20.0
        buffer._writer.flush(20.0)  # type: ignore[union-attr]
        assert buffer.write_count == 3_000
        buffer.close()


def test_a_blocked_collector_ends_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served_memories(tmp_path, 1) as address, innet.connect(address) as replay:
        # A wait at the end would last beyond the timeout of this test.
        buffer = InnetReplayBuffer(10_000, address=address, samples_per_insert=2.0, timeout=1e6)

        def interrupt() -> None:
            until(lambda: bool(replay.stats()["tables"].get(buffer.table, {}).get("waiting_pushes")))
            _thread.interrupt_main()

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            buffer.extend(items(0, 3_000))
        watcher.join()
        buffer.close()
    assert any("items of the interrupted extend are lost" in message for message in caplog.messages)


def test_settings_that_a_learner_does_not_share_are_refused(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        collector = InnetReplayBuffer(1_000, address=address)
        collector.extend(items())
        learner = InnetReplayBuffer(500, address=address, batch_size=4)
        with pytest.raises(errors.TableDiffersError, match="capacity is 1000, asked for 500"):
            learner.sample()
        collector.close()
        learner.close()


def test_a_small_buffer_is_nearly_full() -> None:
    for capacity, block in ((10, 8), (100, 64), (3, 3)):
        buffer = InnetReplayBuffer(capacity)
        for _ in range(5):
            buffer.extend(TensorDict({"observation": torch.zeros(block, 4)}, [block]))
        assert capacity - capacity // 16 - 1 <= len(buffer) <= capacity


def test_bad_input_is_one_error_and_nothing_is_stored(tmp_path: Path) -> None:
    for settings, said in (
        ({"capacity": 0}, "capacity"),
        ({"capacity": 9, "alpha": -1.0}, "priority_exponent"),
        ({"capacity": 9, "beta": 9.0}, "beta is 0 to 4, got 9"),
        ({"capacity": 9, "batch_size": 0}, "batch_size is at least 1"),
        ({"capacity": 9, "connection": {"namespace": "a"}}, "need an address"),
    ):
        with pytest.raises(errors.ReplayError, match=said):
            InnetReplayBuffer(**settings)
    buffer = InnetReplayBuffer(100)
    good = TensorDict({"observation": torch.zeros(5, 4)}, [5])
    # None of these defines the table.
    with pytest.raises(errors.PriorityError, match=r"priority 2 of 5 is -1\.0"):
        buffer.extend(good.clone().set("td_error", torch.tensor([1.0, 1, -1, 1, 1])))
    with pytest.raises(errors.ConfigError, match=r"5 items have priorities of the shape \[5, 0\]"):
        buffer.extend(good.clone().set("td_error", torch.ones(5, 0)))
    with pytest.raises(errors.ConfigError, match="one item: use add"):
        buffer.extend(good[0])
    with pytest.raises(errors.SchemaError, match="items of a list have the same entries"):
        buffer.extend([good[0], TensorDict({"seen": torch.zeros(4)})])
    with pytest.raises(errors.ConfigError, match="or a list of single ones, got list"):
        buffer.extend([1, 2])
    buffer.extend(good[:0])
    buffer.extend(good[:0].set("td_error", torch.zeros(0, 1)))
    with pytest.raises(errors.EmptyError, match="extend it first"):
        buffer.sample(3)
    buffer.extend(good)
    for entries, error, said in (
        (
            {"observation": torch.zeros(5, 3)},
            errors.SchemaError,
            r'"item/observation" has to be float32\[5, 1, 4\] .*, got float32\[5, 1, 3\]',
        ),
        ({"observation": torch.zeros(5, 4).double()}, errors.SchemaError, "float64"),
        ({"seen": torch.zeros(5, 4)}, errors.SchemaError, "seen"),
        ({"observation": torch.zeros(5, 4).bfloat16()}, errors.ConfigError, "is torch.bfloat16, .*: convert it"),
        ({"observation": ["a"] * 5}, errors.ConfigError, "'observation' is NonTensor"),
        ({"a/b": torch.zeros(5)}, errors.ConfigError, "the TensorDict has a part 'a/b': a part's name"),
        ({"index": torch.zeros(5)}, errors.ConfigError, "'index' is a sample's own: rename it"),
        ({"observation": torch.full((5, 4), float("nan"))}, errors.SchemaError, "'observation' has NaN"),
        ({"x": TensorDict({}, [5])}, errors.ConfigError, "'x' is an empty TensorDict"),
    ):
        with pytest.raises(error, match=said):
            buffer.extend(TensorDict(entries, [5]))
    assert len(buffer) == 5
    with pytest.raises(errors.ConfigError, match="give sample a batch_size, or the buffer"):
        buffer.sample()
    index = buffer.sample(2)["index"]
    with pytest.raises(errors.PriorityError, match="priority 0 of 2 is nan"):
        buffer.update_priority(index, float("nan"))
    with pytest.raises(errors.ConfigError, match=r"2 items have priorities of the shape \[3\]"):
        buffer.update_priority(index, torch.ones(3))
    with pytest.raises(errors.ConfigError, match=r"int64, got torch\.int32"):
        buffer.update_priority(index.int(), 1.0)
    with pytest.raises(errors.ConfigError, match="no entry 'td_error'"):
        buffer.update_tensordict_priority(buffer.sample(2))
    buffer.empty()
    with pytest.raises(errors.EmptyError, match="extend it first"):
        buffer.sample(2)
    buffer.extend(good)
    with pytest.raises(errors.ConfigError, match="give it an address"):
        pickle.dumps(buffer)
    token = "k" * 20
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/guarded", token=token) as server:
        guarded = InnetReplayBuffer(100, address=server.addresses[0], connection={"token": token})
        with pytest.raises(errors.ConfigError, match=r"a pickled buffer would show its token: .* INNET_TOKEN"):
            pickle.dumps(guarded)
        guarded.close()
    with served_memories(tmp_path, 1) as address:
        one, two = (InnetReplayBuffer(100, address=address, alpha=alpha, timeout=0.3) for alpha in (0.5, 0.6))
        with pytest.raises(errors.DeadlineError, match=r"no process has added items to .* for 0\.3 s"):
            one.sample(1)
        one.extend(good)
        with pytest.raises(errors.TableDiffersError, match=r"priority_exponent is 0\.5, asked for 0\.6"):
            two.extend(good)
        one.replay.close()
        two.replay.close()
