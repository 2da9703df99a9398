"""The emulated link end to end: pushes, samples and updates of priorities over a delay, and over a link that is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import innet_drl as innet
from benchmarks.relay import Relay

pytestmark = pytest.mark.slow

VIEW = innet.Window(0, 0)
ITEMS = 64


@contextmanager
def served(table: innet.Table) -> Iterator[tuple[innet.Memory, str]]:
    """A memory that is served, and its address for relays."""
    with innet.Memory([table]) as memory, memory.serve("innet://127.0.0.1:0") as server:
        yield memory, server.addresses[0].removeprefix("innet://")


def prioritized() -> innet.Table:
    return innet.Table("steps", {"tag": "int64"}, 1_000, priority_exponent=1.0)


def fill(replay: innet.Replay, steps: int = ITEMS) -> None:
    with replay.writer("steps", 1, VIEW, chunk_steps=1) as writer:
        for tag in range(steps):
            writer.append(tag=[tag], terminated=[False], truncated=[False])


def ids_of(replay: innet.Replay) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The ids of all items, in the order of their tags."""
    batch = replay.sample("steps", 50 * ITEMS, VIEW)
    tags, first = np.unique(batch.tag[:, 0], return_index=True)
    assert len(tags) == ITEMS
    return batch.ids[first]


def test_pushes_and_samples_over_a_link_that_is_slow_and_is_cut() -> None:
    queue = innet.Table("steps", {"tag": "int64"}, 10_000, sampler="fifo", max_times_sampled=1)
    with served(queue) as (memory, to):
        with Relay(to, delay=0.002, rate=5e6) as link:
            with innet.connect(f"innet://{link.address}") as replay, replay.writer("steps", 1, VIEW) as writer:
                for tag in range(2_000):
                    writer.append(tag=[tag], terminated=[False], truncated=[False])
                    if tag in (500, 501, 1_500):
                        link.cut()
                writer.flush()
            sent, received = link.bytes
            assert sent > 2_000 * 8
            assert received > 0
        batch = memory.sample("steps", 2_000, VIEW)
        assert (batch.tag[:, 0] == np.arange(2_000)).all()


def test_a_sampler_goes_on_over_a_new_connection() -> None:
    with served(prioritized()) as (memory, to), Relay(to, delay=0.002) as link:
        fill(memory)
        with (
            innet.connect(f"innet://{link.address}") as replay,
            replay.batches("steps", 8, VIEW) as batches,
        ):
            for turn in range(60):
                assert len(next(batches)) == 8
                if turn % 20 == 10:
                    link.cut()


def sampled(memories: Sequence[innet.Memory]) -> int:
    """Items that the servers have sampled."""
    return sum(memory.stats()["tables"]["steps"]["sampled_items"] for memory in memories)


def ahead(memories: Sequence[innet.Memory], to: Sequence[str], delay: float, prefetch: int) -> int:
    """Most batches that the servers have sampled and the reader has not read yet."""
    most, before = 0, sampled(memories)
    with ExitStack() as stack:
        links = [stack.enter_context(Relay(one, delay=delay)) for one in to]
        replay = stack.enter_context(innet.connect(",".join(f"innet://{link.address}" for link in links)))
        batches = stack.enter_context(replay.batches("steps", 4, VIEW, prefetch=prefetch))
        for read in range(200 if prefetch > 1 else 10):
            most = max(most, (sampled(memories) - before) // 4 - read)
            assert len(next(batches)) == 4
    return most


def test_requests_under_way_grow_with_the_round_trip() -> None:
    with served(prioritized()) as (memory, to):
        fill(memory)
        # One that is decoded ahead, one under way, and one in the decoder.
        assert ahead([memory], [to], 0.05, prefetch=1) <= 3
        assert ahead([memory], [to], 0.05, prefetch=2) > 12


def test_requests_to_several_servers_grow_with_the_round_trip() -> None:
    with served(prioritized()) as (first, to_first), served(prioritized()) as (second, to_second):
        memories, to = [first, second], [to_first, to_second]
        for memory in memories:
            fill(memory)
        assert ahead(memories, to, 0.05, prefetch=1) <= 3
        assert ahead(memories, to, 0.05, prefetch=2) > 12


def test_requests_shrink_when_the_far_server_is_left_out() -> None:
    with served(prioritized()) as (near, to_near), served(prioritized()) as (far, to_far):
        for memory in (near, far):
            fill(memory)
        of_near = set(ids_of(near).tolist())

        def shrink() -> bool:
            """Whether few requests to the near server are under way soon after the far one is left out."""
            before = sampled([near])
            with (
                Relay(to_far, delay=0.05) as link,
                innet.connect(f"innet://{to_near},innet://{link.address}") as replay,
                replay.batches("steps", 4, VIEW, prefetch=2, threads=1) as batches,
            ):

                def read() -> int:
                    """Items of the near server in the next batch."""
                    return sum(id in of_near for id in next(batches).ids.tolist())

                # The most of many readings: a reader that was paused for a moment has few requests under way.
                items, grown = 0, 0.0
                for _ in range(200):
                    items += read()
                    # Half of each batch is the near server's.
                    grown = max(grown, (sampled([near]) - before - items) / 2)
                assert grown > 12
                link.close()
                few = 0
                for _ in range(2_000):
                    got = read()
                    items += got
                    # Two under way, two decoded ahead, one in the decoder.
                    few = few + 1 if got == 4 and sampled([near]) - before - items <= 5 * 4 else 0
                    if few == 20:
                        return True
                return False

        # On a busy machine a handshake with the near server may take a millisecond, which counts as a distance.
        assert any(shrink() for _ in range(10))


def test_updates_that_are_not_waited_for_apply_in_order_also_over_a_cut_link() -> None:
    with served(prioritized()) as (memory, to), Relay(to, delay=0.01) as link:
        fill(memory)
        ids = ids_of(memory)
        receipts = []
        with innet.connect(f"innet://{link.address}") as replay:
            for turn in range(150):
                priorities = np.arange(ITEMS) + turn + 1.0
                receipts.append(replay.update_priorities("steps", ids, priorities, wait=False))
                if turn in (40, 41, 100):
                    link.cut()
            # Nothing was waited for before the window was full.
            assert receipts[0].applied == 0
            assert sum(each.applied for each in receipts) < 150 * ITEMS
            # An update that waits follows the earlier ones, and brings their counts.
            receipts.append(replay.update_priorities("steps", [], []))
            assert sum(each.applied for each in receipts) == 150 * ITEMS
            assert not any(each.stale for each in receipts)
        batch = memory.sample("steps", 50 * ITEMS, VIEW)
        last = np.arange(ITEMS) + 150.0
        np.testing.assert_allclose(batch.probabilities, (last / last.sum())[batch.tag[:, 0]], rtol=1e-4)


def test_closing_waits_for_updates() -> None:
    with served(prioritized()) as (memory, to), Relay(to, delay=0.02) as link:
        fill(memory)
        ids = ids_of(memory)
        with innet.connect(f"innet://{link.address}") as replay:
            for _ in range(10):
                replay.update_priorities("steps", ids, np.ones(ITEMS), wait=False)
        assert memory.stats()["tables"]["steps"]["updated_priorities"] == 10 * ITEMS


def test_wrong_updates_that_are_not_waited_for() -> None:
    with served(prioritized()) as (memory, to), innet.connect(f"innet://{to}") as replay:
        fill(memory)
        ids = ids_of(memory)
        # What this end knows to be wrong is never sent.
        with pytest.raises(innet.errors.PriorityError):
            replay.update_priorities("steps", ids, np.full(ITEMS, np.nan), wait=False)
        with pytest.raises(innet.errors.SchemaError, match="64 ids and 63 priorities"):
            replay.update_priorities("steps", ids, np.ones(ITEMS - 1), wait=False)
        assert replay.update_priorities("steps", ids, np.ones(ITEMS)).applied == ITEMS
        replay.update_priorities("elsewhere", ids, np.ones(ITEMS), wait=False)
        with pytest.raises(innet.errors.UnknownTableError, match="elsewhere"):
            replay.update_priorities("steps", ids, np.ones(ITEMS))
        assert replay.update_priorities("steps", ids, np.ones(ITEMS)).applied == ITEMS
        # In process there is nothing to wait for.
        assert memory.update_priorities("steps", ids, np.ones(ITEMS), wait=False).applied == ITEMS
