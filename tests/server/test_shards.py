"""One memory over several servers: frequencies, weights, updates, the replay ratio, and servers that go away."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from calls import Call, Lines
from recording_relay import RecordingRelay
from serving import Server, until
from steps import VIEW, fill, step, still_works, table
from training import lines, small

import innet_drl as innet
from innet_drl.launch import start

pytestmark = pytest.mark.timeout(110)

ALPHA = 0.6
Connect = Callable[..., innet.Replay]


def priority(action: int) -> float:
    """A priority that only the step's number decides."""
    return 0.1 + action * 7919 % 101 / 20


def write(replay: innet.Replay, server: int, actions: range) -> None:
    """Writes steps with these numbers to one of the servers."""
    with replay.writer("t", 1, VIEW, server=server) as writer:
        for index, action in enumerate(actions):
            one = step(index, priority=np.array([priority(action)]))
            writer.append(**{**one, "action": np.array([action])})


def count(log: Lines, part: str) -> int:
    """Lines of the log with these words."""
    return sum(part in line for line in log.lines)


FALSE_ALARM = 1e-8
"""P-value of wrong frequencies. Servers sample in strata: counts are closer to their means than independent ones."""


def p_value(observed: Counter[int], expected: dict[int, float]) -> float:
    """Of a chi-square of counts by item; the rarest items are counted together, 20 expected or more at a time."""
    assert set(observed) <= set(expected)
    counts, means, count, mean = [], [], 0, 0.0
    for each in sorted(expected, key=expected.__getitem__):
        count, mean = count + observed[each], mean + expected[each]
        if mean >= 20:
            counts.append(count)
            means.append(mean)
            count, mean = 0, 0.0
    # The most frequent one that is left over belongs to the last group.
    counts[-1] += count
    means[-1] += mean
    return float(scipy.stats.chisquare(counts, means).pvalue)


def probabilities(memory: innet.Replay) -> dict[int, float]:
    """Probabilities of all items of a memory, by action."""
    found: dict[int, float] = {}
    while len(found) < memory.stats()["tables"]["t"]["items"]:
        batch = memory.sample("t", 256, VIEW)
        found |= dict(zip(batch.action.tolist(), batch.probabilities.tolist(), strict=True))
    return found


def expect(draws: float, mass: dict[int, float]) -> dict[int, float]:
    """Expected counts of items by action, in proportion to their mass."""
    total = sum(mass.values())
    return {action: draws * each / total for action, each in mass.items()}


def expect_equal_parts(draws: int, mass: dict[int, float]) -> dict[int, float]:
    """Expected counts if each server's part of a batch were the same, which is wrong."""
    servers = {action // 150 for action in mass}
    parts = [{action: each for action, each in mass.items() if action // 150 == server} for server in servers]
    return {action: count for part in parts for action, count in expect(draws / len(parts), part).items()}


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Connects to three servers, the first one on TCP, whose addresses are in the order of `stats()["shards"]`."""
    with ExitStack() as stack:

        def make(*tables: innet.Table, servers: int = 3) -> innet.Replay:
            addresses = []
            for server in range(servers):
                at = "innet://127.0.0.1:0" if server == 0 else f"unix://{tmp_path}/{server}"
                memory = stack.enter_context(innet.Memory())
                addresses += stack.enter_context(memory.serve(at)).addresses
            return stack.enter_context(innet.connect(",".join(addresses), tables=tables))

        yield make


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """Two servers in processes of their own."""
    with Server(f"unix://{tmp_path}/a") as first, Server(f"unix://{tmp_path}/b") as second:
        yield [first, second]


def address(servers: Sequence[Server]) -> str:
    return ",".join(server.address for server in servers)


PARTS = {0: range(150), 1: range(200, 260), 2: range(300, 320)}


def test_frequencies_and_weights_are_those_of_one_memory(connect: Connect) -> None:
    shards = connect(table(capacity=3000))
    with innet.Memory(table(capacity=3000)) as one:
        for server, actions in PARTS.items():
            write(shards, server, actions)
            write(one, server, actions)
        probability = probabilities(one)
        live = len(probability)
        assert shards.stats()["tables"]["t"]["items"] == live
        least = one.sample("t", 8, VIEW, normalize="memory", beta=1.0)
        with shards.batches("t", 64, VIEW, beta=1.0, timeout=30) as ahead:
            for prefetched in (True, False):
                counts: Counter[int] = Counter()
                for _ in range(300):
                    batch = next(ahead) if prefetched else shards.sample("t", 64, VIEW, beta=1.0)
                    assert len(batch) == 64
                    actions = batch.action.tolist()
                    counts.update(actions)
                    expected = np.array([probability[action] for action in actions])
                    np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-6)
                    np.testing.assert_allclose(batch.weights, expected.min() / expected, rtol=1e-5)
                assert p_value(counts, expect(300 * 64, probability)) > FALSE_ALARM
                assert p_value(counts, expect_equal_parts(300 * 64, probability)) < FALSE_ALARM
        # The weights over the whole memory need the smallest probability of all servers.
        batch = shards.sample("t", 64, VIEW, normalize="memory", beta=1.0)
        smallest = least.weights * least.probabilities
        np.testing.assert_allclose(batch.weights * batch.probabilities, smallest[0], rtol=1e-5)
        # The observations belong to their actions: the frame's pixels are the number of the step in its writer.
        starts = {action: actions.start for actions in PARTS.values() for action in actions}
        newest = batch.observation[:, -1, 0, 0]
        assert newest.tolist() == [action - starts[action] for action in batch.action.tolist()]


def test_several_servers_rank_their_own_items(connect: Connect) -> None:
    ranked = table(capacity=3000, sampler="rank_based", priority_exponent=0.7)
    shards = connect(ranked)
    mass: dict[int, float] = {}
    for name, actions in PARTS.items():
        write(shards, name, actions)
        # A memory of the items of this writer alone, which are those of its server.
        with innet.Memory(ranked) as own:
            write(own, name, actions)
            total = own.stats()["tables"]["t"]["total_mass"]
            mass |= {action: each * total for action, each in probabilities(own).items()}
    expected = expect(1.0, mass)
    counts: Counter[int] = Counter()
    for _ in range(300):
        batch = shards.sample("t", 64, VIEW, beta=1.0)
        actions = batch.action.tolist()
        counts.update(actions)
        np.testing.assert_allclose(batch.probabilities, [expected[action] for action in actions], rtol=1e-6)
        weights = batch.probabilities.min() / batch.probabilities
        np.testing.assert_allclose(batch.weights, weights, rtol=1e-5)
    assert p_value(counts, expect(300 * 64, mass)) > FALSE_ALARM


@pytest.mark.parametrize("prefetched", [False, True])
def test_frequencies_hold_while_one_server_fills(connect: Connect, prefetched: bool) -> None:
    shards = connect(table(capacity=3000))
    full, filling = range(150, 250), range(150)
    with innet.Memory(table(capacity=3000)) as one:
        write(one, 1, full)
        write(one, 0, filling)
        mass = probabilities(one)
    write(shards, 1, full)
    counts: Counter[int] = Counter()
    expected, wrong = dict.fromkeys(mass, 0.0), dict.fromkeys(mass, 0.0)
    with (
        shards.batches("t", 64, VIEW, timeout=30, prefetch=1, threads=1) as ahead,
        shards.writer("t", 1, VIEW, server=0) as writer,
    ):
        for action in filling:
            row = step(action, priority=np.array([priority(action)]))
            writer.append(**{**row, "action": np.array([action])})
            if action % 10 != 9:
                continue
            # Whole episodes: each of their steps is an item.
            writer.flush()
            live = {each: mass[each] for each in (*full, *range(action + 1))}
            if prefetched:
                # Those asked for before the flush, and those whose parts are by an answer from before it.
                for _ in range(8):
                    next(ahead)
            for _ in range(20):
                batch = next(ahead) if prefetched else shards.sample("t", 64, VIEW)
                counts.update(batch.action.tolist())
            for each in live:
                expected[each] += expect(20 * 64, live)[each]
                wrong[each] += expect_equal_parts(20 * 64, live)[each]
    assert p_value(counts, expected) > FALSE_ALARM
    assert p_value(counts, wrong) < FALSE_ALARM


def test_updates_go_to_the_server_of_the_id(connect: Connect) -> None:
    shards = connect(table(capacity=3000))
    for server, actions in PARTS.items():
        write(shards, server, actions)
    batch = shards.sample("t", 512, VIEW)
    ids = np.unique(batch.ids)
    assert len({int(number) for number in ids >> 48}) == 3
    receipt = shards.update_priorities("t", ids, np.full(len(ids), 1e-6))
    assert (receipt.applied, receipt.stale) == (len(ids), 0)
    assert len(np.intersect1d(shards.sample("t", 64, VIEW).ids, ids)) < 8
    # Of a client that has sampled nothing, and with ids of no server.
    with innet.connect(",".join(shards.stats()["shards"])) as other:
        receipt = other.update_priorities("t", np.append(ids, np.uint64(7)), np.full(len(ids) + 1, 50.0))
    assert (receipt.applied, receipt.stale) == (len(ids), 1)
    assert np.isin(shards.sample("t", 64, VIEW).ids, ids).mean() > 0.9
    with pytest.raises(innet.errors.PriorityError):
        shards.update_priorities("t", ids, np.append(np.full(len(ids) - 1, 1e-6), -1.0))
    assert np.isin(shards.sample("t", 64, VIEW).ids, ids).mean() > 0.9, "nothing of it was applied"


def test_updates_that_are_not_waited_for_go_to_the_server_of_the_id(connect: Connect) -> None:
    shards = connect(table(capacity=3000))
    for server, actions in PARTS.items():
        write(shards, server, actions)
    ids = np.unique(shards.sample("t", 512, VIEW).ids)
    assert len({int(number) for number in ids >> 48}) == 3
    receipts = [
        shards.update_priorities("t", part, np.full(len(part), 1e-6), wait=False) for part in np.split(ids, [5, 9])
    ]
    receipts += [shards.update_priorities("t", [7], [1.0], wait=False), shards.update_priorities("t", [], [])]
    assert (sum(one.applied for one in receipts), sum(one.stale for one in receipts)) == (len(ids), 1)
    assert len(np.intersect1d(shards.sample("t", 64, VIEW).ids, ids)) < 8
    with pytest.raises(innet.errors.PriorityError):
        shards.update_priorities("t", ids, np.append(np.full(len(ids) - 1, 50.0), -1.0), wait=False)
    assert shards.update_priorities("t", [], []).applied == 0, "nothing of it was sent"


def test_ids_of_restored_items_go_to_their_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(f"unix://{tmp_path}/{name}", f"--snapshot={tmp_path}/{name}-snapshots"))
            for name in "ab"
        ]
        shards = stack.enter_context(innet.connect(address(servers), tables=[table(capacity=2000)]))
        write(shards, 0, range(100))
        write(shards, 1, range(200, 300))
        ids = np.unique(shards.sample("t", 512, VIEW).ids)
        for _ in range(2):
            for server in servers:
                server.send(signal.SIGTERM)
                server.wait()
                server.start()
        # Of a client that has sampled nothing since, and of one that then has.
        other = stack.enter_context(innet.connect(address(servers)))
        for _ in range(2):
            receipt = other.update_priorities("t", ids, np.full(len(ids), 2.0))
            assert (receipt.applied, receipt.stale) == (len(ids), 0)
            assert np.isin(ids, other.sample("t", 2048, VIEW).ids).mean() > 0.9


def test_without_prefetch_a_batch_follows_the_updates_before_it(connect: Connect) -> None:
    """One item after another gets almost all the mass, on the servers in turn."""
    shards = connect(table(priority_exponent=1.0))
    for server in range(3):
        write(shards, server, range(150 * server, 150 * server + 50))
    ids = np.zeros(0, np.uint64)
    while len(ids) < shards.stats()["tables"]["t"]["items"]:
        ids = np.union1d(ids, shards.sample("t", 256, VIEW).ids)
    with shards.batches("t", 16, VIEW, timeout=30, prefetch=0) as batches:
        for chosen in ids[:: len(ids) // 8]:
            shards.update_priorities("t", ids, np.where(ids == chosen, 1e6, 1e-6))
            before = shards.stats()["tables"]["t"]["sampled_items"]
            assert set(next(batches).ids) == {chosen}
            assert shards.stats()["tables"]["t"]["sampled_items"] == before + 16


def test_updates_at_a_server_that_is_away_are_stale(servers: list[Server]) -> None:
    with innet.connect(address(servers), tables=[table(capacity=2000)]) as shards:
        write(shards, 0, range(100))
        write(shards, 1, range(200, 300))
        batch = shards.sample("t", 64, VIEW)
        at_second = int((batch.action >= 200).sum())
        shards.update_priorities("t", batch.ids, np.ones(64), wait=False)
        first = shards.update_priorities("t", [], [])
        assert first.stale == 0
        servers[1].kill()
        receipts = [shards.update_priorities("t", batch.ids, np.ones(64), wait=False) for _ in range(3)]
        receipts.append(shards.update_priorities("t", [], []))
        assert sum(one.applied for one in receipts) == 3 * (first.applied - at_second)
        assert sum(one.stale for one in receipts) == 3 * at_second


def test_one_shard_may_hold_everything(connect: Connect) -> None:
    shards = connect(table(capacity=3000, min_size=9))
    with pytest.raises(innet.errors.DeadlineError, match=r'"t" has 0 items of the 9 that min_size.*127\.0\.0\.1.*unix'):
        shards.sample("t", 4, VIEW, timeout=0)
    write(shards, 2, range(40))
    assert len(shards.sample("t", 64, VIEW)) == 64
    assert [stats["tables"]["t"]["items"] > 0 for stats in shards.stats()["shards"].values()] == [False, False, True]


def test_a_table_is_divided_and_read_whole(connect: Connect) -> None:
    shards = connect(table(capacity=3000, min_size=90))
    assert shards.table("t") == table(capacity=3000, min_size=90)
    assert shards.tables() == {"t": shards.table("t")}
    assert {stats["tables"]["t"]["capacity"] for stats in shards.stats()["shards"].values()} == {1000}
    limited = table("limited", capacity=3000, samples_per_insert=2.0, slack=300.0)
    shards.create_table(limited)
    assert shards.table("limited") == limited
    shards.drop_table("limited")
    with pytest.raises(innet.errors.TableDiffersError, match="capacity"):
        shards.create_table(table(capacity=6000, min_size=90))
    fill(shards, 100)
    shards.empty_table("t")
    assert shards.stats()["tables"]["t"]["items"] == 0
    shards.drop_table("t")
    assert shards.tables() == {}


def test_unread_items_are_added_up(connect: Connect) -> None:
    shards = connect(table(capacity=300, sampler="uniform", max_times_sampled=1))
    for server in range(3):
        with shards.writer("t", 1, VIEW, server=server, chunk_steps=10) as writer:
            for t in range(200):
                writer.append(**step(t))
    stats = shards.stats()
    parts = [part["tables"]["t"]["evicted_unread_items"] for part in stats["shards"].values()]
    assert min(parts) > 0
    assert stats["tables"]["t"]["evicted_unread_items"] == sum(parts)


def test_writers_are_spread_and_keep_to_their_server(connect: Connect) -> None:
    shards = connect(table(capacity=3000))
    with ExitStack() as stack:
        for index in range(6):
            stack.enter_context(shards.writer("t", 1, VIEW, name=f"actor {5 - index}", server=index))
        for _ in range(3):
            stack.enter_context(shards.writer("t", 1, VIEW, name="any"))
        counts = [stats["tables"]["t"]["by_writer"] for stats in shards.stats()["shards"].values()]
        names = [sorted(writer["name"] for writer in writers) for writers in counts]
        assert names == [["actor 2", "actor 5", "any"], ["actor 1", "actor 4", "any"], ["actor 0", "actor 3", "any"]]


@pytest.mark.parametrize("writers", [(0, 1, 2), (0,)])
def test_the_replay_ratio_counts_over_all_servers(connect: Connect, writers: tuple[int, ...]) -> None:
    ratio, slack, minimum = 2.0, 400.0, 90
    shards = connect(table(capacity=9000, min_size=minimum, samples_per_insert=ratio, slack=slack))
    # The items of one server have nearly all the priority: its limiter alone would hold up every batch.
    for server in writers:
        with shards.writer("t", 1, VIEW, server=server) as writer:
            for index in range(95):
                writer.append(**step(index, priority=np.array([100.0 if server == 0 else 0.01])))
    sampled = 0
    with pytest.raises(innet.errors.DeadlineError):
        while True:
            sampled += len(shards.sample("t", 16, VIEW, timeout=1))
    stats = shards.stats()["tables"]["t"]
    assert stats["limiter_sampled"] == sampled
    each = [one["tables"]["t"]["limiter_inserted"] for one in shards.stats()["shards"].values()]
    # A third of the slack at each server, rounded up.
    most = sum(max(0.0, ratio * inserted - ratio * minimum / 3 + 134) for inserted in each)
    assert most - 16 < sampled <= most
    short = shards.sample("t", 16, VIEW, timeout=3, allow_short=True) if most - sampled >= 1 else ()
    assert len(short) == int(most - sampled)


@pytest.mark.parametrize("writers", [(0, 1, 2), (0,)])
def test_several_servers_admit_every_batch_that_one_server_admits(connect: Connect, writers: tuple[int, ...]) -> None:
    limited, most = table(capacity=3000, min_size=9, samples_per_insert=2.0, slack=33.0), 64
    with innet.Memory(limited) as one, pytest.raises(innet.errors.ConfigError, match=f"at most {most} items"):
        one.sample("t", most + 1, VIEW)
    shards = connect(limited)
    ended = threading.Event()

    def act(server: int) -> None:
        with shards.writer("t", 1, VIEW, server=server, chunk_steps=1) as writer:
            t = 0
            while not ended.is_set():
                with suppress(innet.errors.DeadlineError):
                    writer.append(**step(t), timeout=0.05)
                    t += 1

    acting = [Call(partial(act, server)) for server in writers]
    for timeout in 15 * [60, 0.0]:
        batch = None
        while batch is None:
            # A call at its deadline is continued by the next one.
            with suppress(innet.errors.DeadlineError):
                batch = shards.sample("t", most, VIEW, timeout=timeout)
        assert len(batch) == most
    # No limiter counted a sample that was not delivered.
    assert shards.stats()["tables"]["t"]["limiter_sampled"] == 30 * most
    with shards.batches("t", most, VIEW, timeout=60) as ahead:
        for _ in range(30):
            assert len(next(ahead)) == most
    ended.set()
    # The writers' last steps wait for samples.
    while any(call.is_alive() for call in acting):
        with suppress(innet.errors.DeadlineError):
            shards.sample("t", most, VIEW, timeout=0.05, allow_short=True)
    assert [call.ended() for call in acting] == [None] * len(writers)


def test_an_uneven_job_keeps_the_ratio_and_stops_nobody(connect: Connect) -> None:
    """Nine of ten steps are at one server, the items of the second are hardly sampled, the third has no writers."""
    ratio, slack, minimum = 2.0, 300.0, 9
    shards = connect(table(capacity=9000, min_size=minimum, samples_per_insert=ratio, slack=slack))
    ended = threading.Event()
    written = [0, 0]

    def act(server: int, priority: float) -> None:
        with shards.writer("t", 1, VIEW, server=server, chunk_steps=1) as writer:
            while not ended.is_set():
                if server == 1 and written[0] < 9 * written[1]:
                    ended.wait(0.001)
                    continue
                with suppress(innet.errors.DeadlineError):
                    writer.append(**step(written[server], priority=np.array([priority])), timeout=0.05)
                    written[server] += 1

    def inserted() -> list[int]:
        return [one["tables"]["t"]["limiter_inserted"] for one in shards.stats()["shards"].values()]

    acting = [Call(partial(act, server, priority)) for server, priority in enumerate((100.0, 1e-6))]
    sampled, before = 0, [-1, -1, -1]
    for _ in range(4):
        for _ in range(50):
            sampled += len(shards.sample("t", 32, VIEW, timeout=60))
        now = inserted()
        assert now[0] > before[0]
        assert now[1] > before[1]
        before = now
    stats = shards.stats()["tables"]["t"]
    assert sampled <= stats["limiter_sampled"] < sampled + 32
    assert stats["limiter_sampled"] <= ratio * (stats["limiter_inserted"] - minimum) + slack
    # A push, also that of an episode's last items, applies as a whole.
    assert stats["limiter_inserted"] <= (stats["limiter_sampled"] + slack) / ratio + minimum + 10
    ended.set()
    # The writers' last steps wait for samples.
    while any(call.is_alive() for call in acting):
        with suppress(innet.errors.DeadlineError):
            shards.sample("t", 32, VIEW, timeout=0.05, allow_short=True)
    assert [call.ended() for call in acting] == [None, None]


def test_readers_of_short_batches_share_what_the_rate_limiters_admit(connect: Connect) -> None:
    """Each sees samples that another one takes meanwhile."""
    shards = connect(table(capacity=9000, samples_per_insert=1.0, slack=300.0))
    ended, sampled = threading.Event(), [0] * 4

    def read(number: int) -> None:
        with innet.connect(",".join(shards.stats()["shards"])) as reader:
            while not ended.is_set():
                with suppress(innet.errors.DeadlineError):
                    sampled[number] += len(reader.sample("t", 32, VIEW, timeout=0, allow_short=True))

    readers = [Call(partial(read, number)) for number in range(4)]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(shards.writer("t", 1, VIEW, server=server, chunk_steps=1)) for server in range(3)
        ]
        for t in range(600):
            for writer in writers:
                writer.append(**step(t), timeout=60)
    ended.set()
    assert [reader.ended() for reader in readers] == [None] * 4
    taken = shards.stats()["tables"]["t"]["limiter_sampled"]
    assert taken > 600
    # A short batch may be paid in part; its reader makes up for the rest.
    assert sum(sampled) < taken + len(readers) * 32


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_sample_sends_the_steps_that_its_program_holds_back(connect: Connect, prefetch: int) -> None:
    shards = connect(table())
    with shards.writer("t", 1, VIEW, chunk_steps=50) as writer:
        for t in range(20):
            writer.append(**step(t))
        assert len(shards.sample("t", 4, VIEW, timeout=20)) == 4
        writer.append(**step(20))
    shards.empty_table("t")
    with shards.writer("t", 1, VIEW, chunk_steps=50) as writer:
        for t in range(20):
            writer.append(**step(t))
        with shards.batches("t", 4, VIEW, prefetch=prefetch, timeout=20) as batches:
            assert len(next(batches)) == 4


def test_an_unfinished_batch_survives_other_samples_and_no_other_table(connect: Connect) -> None:
    limited, most = table(capacity=3000, samples_per_insert=2.0, slack=33.0), 64
    shards = connect(limited)
    with shards.writer("t", 1, VIEW, server=0, chunk_steps=1) as writer:
        for t in range(16):
            writer.append(**step(t))
        counted = []
        for _ in range(3):
            with pytest.raises(innet.errors.DeadlineError):
                shards.sample("t", most, VIEW, timeout=0.0)
            counted.append(shards.stats()["tables"]["t"]["limiter_sampled"])
            with suppress(innet.errors.DeadlineError):
                shards.sample("t", 2, VIEW, timeout=0.0)
        # The second and third call go on with the batch that the first one has begun.
        assert counted[0] > 0
        assert counted[2] <= most
    shards.drop_table("t")
    shards.create_table(limited)
    with shards.writer("t", 1, VIEW, server=1, chunk_steps=1) as writer:
        for t in range(100, 105):
            writer.append(**step(t), timeout=10)
        writer.flush(10)
        assert (shards.sample("t", 4, VIEW, timeout=10).action >= 100).all()


def test_parameters_have_one_version_everywhere(servers: list[Server], log: Lines) -> None:
    tensors = {"w": np.arange(4, dtype=np.float32)}
    with innet.connect(address(servers), tables=[table()]) as shards:
        assert [shards.put_parameters("p", tensors) for _ in range(3)] == [1, 2, 3]
        servers[1].kill()
        assert shards.put_parameters("p", tensors) == 4
        servers[1].start()
        until(lambda: count(log, "is sampled again") == 1)
        assert shards.put_parameters("p", {"w": np.zeros(4, np.float32)}) == 5
        for server in servers:
            with innet.connect(server.address) as one:
                assert one.parameters() == {"p": 5}
        found = shards.get_parameters("p", newer_than=4)
        assert found is not None
        assert found.version == 5


def test_a_server_that_is_away_is_left_out_and_taken_up_again(servers: list[Server], log: Lines) -> None:
    with innet.connect(address(servers), tables=[table(capacity=2000)]) as shards:
        write(shards, 0, range(100))
        write(shards, 1, range(200, 300))
        with shards.batches("t", 32, VIEW, timeout=30) as batches:
            before = [next(batches) for _ in range(20)]
            ids = np.concatenate([batch.ids for batch in before])
            assert {bool(action >= 200) for batch in before for action in batch.action} == {False, True}
            servers[1].kill()
            left = shards.sample("t", 64, VIEW)
            assert (left.action < 200).all()
            with innet.connect(servers[0].address) as one:
                alone = one.sample("t", 2000, VIEW)
            probability = dict(zip(alone.ids.tolist(), alone.probabilities.tolist(), strict=True))
            # The weights count the servers that are there.
            expected = [
                probability.get(id, p) for id, p in zip(left.ids.tolist(), left.probabilities.tolist(), strict=True)
            ]
            np.testing.assert_allclose(left.probabilities, expected, rtol=1e-6)
            for _ in range(20):
                next(batches)
            receipt = shards.update_priorities("t", ids, np.ones(len(ids)))
            assert 0 < receipt.applied < len(ids)
            assert receipt.applied + receipt.stale == len(ids)
            assert shards.stats()["shards"][servers[1].address] is None
            with pytest.raises(
                innet.errors.DisconnectedError, match="empty_table is for every server, and this one is away"
            ):
                shards.empty_table("t")
            write(shards, 1, range(100, 120))
            assert count(log, "is away") == 1
            servers[1].start()
            until(lambda: count(log, "is sampled again") == 1)
            write(shards, 1, range(300, 400))
            until(lambda: bool((next(batches).action >= 300).any()))
        assert shards.stats()["shards"][servers[1].address]["tables"]["t"]["items"] > 0
        assert count(log, "is away") == 1


def test_a_server_that_is_away_at_the_start_is_taken_up(servers: list[Server], log: Lines) -> None:
    servers[0].kill()
    with innet.connect(address(servers), tables=[table(capacity=2000)], timeout=0.5) as shards:
        assert count(log, "is away") == 1
        write(shards, 0, range(50))
        assert len(shards.sample("t", 8, VIEW)) == 8
        servers[0].start()
        until(lambda: count(log, "is sampled again") == 1)
        assert still_works(shards)
        servers[0].kill()
        servers[1].kill()
        with pytest.raises(innet.errors.DeadlineError, match=r"none of these servers answers") as waited:
            shards.sample("t", 8, VIEW, timeout=0.5)
        assert all(server.address in str(waited.value) for server in servers)


def test_bad_lists_of_servers_say_what_to_do(tmp_path: Path, connect: Connect) -> None:
    def refusal(error: type[innet.ReplayError], text: str, to: str, **options: object) -> None:
        with pytest.raises(error, match=text):
            innet.connect(to, timeout=5.0, **options)  # type: ignore[arg-type]

    refusal(innet.errors.ConfigError, "names innet://a:7710 twice: name each server once", "innet://a,b,a:7710")
    refusal(innet.errors.ConfigError, "innet://host:port", "innet://a,,b")
    with ExitStack() as stack:
        tables = {"a": [table()], "b": [table(capacity=2000)], "c": [table("other")], "d": []}
        at = {}
        for name, made in tables.items():
            memory = stack.enter_context(innet.Memory(made))
            at[name] = stack.enter_context(memory.serve(f"unix://{tmp_path}/{name}.s")).addresses[0]
        secret = stack.enter_context(innet.Memory()).serve(f"unix://{tmp_path}/e.s", token="sixteen bytes ok")
        at["e"] = stack.enter_context(secret).addresses[0]
        refusal(
            innet.errors.TableDiffersError,
            r"b\.s capacity is 2000, asked for 1000 by .*a\.s: drop",
            f"{at['a']},{at['b']}",
        )
        refusal(innet.errors.ConfigError, r'"t" is at .*a\.s and not at .*c\.s: name', f"{at['a']},{at['c']}")
        refusal(innet.errors.ConfigError, r'"t" is at .*a\.s and not at', f"{at['d']},{at['a']},{at['c']}")
        with innet.connect(at["d"]) as empty:
            assert empty.tables() == {}, "a list that is refused changes no server"
        refusal(
            innet.errors.AuthenticationError, r"e\.s.*servers of one list have the same token", f"{at['a']},{at['e']}"
        )
        with innet.connect(f"{at['d']},{at['a']}") as shards:
            assert shards.table("t") == table(capacity=2000), "an empty server gets the tables of the others"
        refusal(innet.errors.ConnectError, "nowhere", f"unix://{tmp_path}/nowhere,unix://{tmp_path}/nowhere2")
        with RecordingRelay(tmp_path / "f.s", tmp_path / "b.s") as relay:
            release = innet.__version__.encode()
            relay.in_replies = release, b"9" * len(release)
            refusal(
                innet.errors.ConfigError,
                rf"a\.s is of release {innet.__version__} and .*f\.s of release 9+: install the same release",
                f"{at['a']},{relay.address}",
            )
    shards = connect(table("queue", sampler="fifo", max_times_sampled=1))
    with pytest.raises(innet.errors.ConfigError, match="several servers do not share"):
        shards.sample("queue", 1, VIEW)


def test_training_runs_over_two_servers(tmp_path: Path, servers: list[Server]) -> None:
    run = tmp_path / "run"
    start.train(small(replay=address(servers), actors=2), run)
    assert lines(run)[-1]["learner_updates"] > 50
    with innet.connect(address(servers)) as shards:
        each = [stats["tables"][run.name]["inserted_items"] for stats in shards.stats()["shards"].values()]
        assert all(each)
