"""Every method of `Replay`, in this process and through a server: what it returns and what it refuses."""

from __future__ import annotations

import gc
import pickle
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from calls import Lines
from serving import until
from steps import COLUMNS, VIEW, fill, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors


def test_tables_are_made_described_emptied_and_dropped(make_replay: MakeReplay) -> None:
    definition = table(min_size=2, samples_per_insert=4.0, slack=100.0)
    replay = make_replay([definition])
    replay.create_table(definition)
    assert replay.table("t") == definition
    assert list(replay.table("t").columns) == list(COLUMNS)
    fill(replay, 30)
    assert len(replay.sample("t", 8, VIEW, timeout=5)) == 8
    replay.empty_table("t")
    with pytest.raises(errors.DeadlineError):
        replay.sample("t", 8, VIEW, timeout=0)
    replay.drop_table("t")
    with pytest.raises(errors.UnknownTableError, match="no table") as caught:
        replay.table("t")
    assert isinstance(caught.value, KeyError)
    assert '"t"' in str(caught.value)
    assert not str(caught.value).startswith("'")


def test_tables_and_parameters_are_listed(make_replay: MakeReplay) -> None:
    replay = make_replay([])
    assert (replay.tables(), replay.parameters()) == ({}, {})
    definitions = {name: innet.Table(name, COLUMNS, 100) for name in ("second", "first")}
    for definition in definitions.values():
        replay.create_table(definition)
    for value in range(2):
        replay.put_parameters("policy", {"w": np.full(3, value)})
    replay.put_parameters("a", {"w": np.zeros(3)})
    assert replay.tables() == definitions
    assert list(replay.tables()) == ["first", "second"]
    assert replay.parameters() == {"a": 1, "policy": 2}
    replay.drop_table("first")
    assert list(replay.tables()) == ["second"]


def test_a_table_with_another_definition_shows_the_difference(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=1000)])
    with pytest.raises(errors.TableDiffersError, match=r"capacity is 1000, asked for 2000") as caught:
        replay.create_table(table(capacity=2000))
    assert isinstance(caught.value, ValueError)


def test_a_table_made_anew_with_other_columns_is_sampled_as_it_is_now(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 20)
    replay.sample("t", 4, VIEW, timeout=5)
    replay.drop_table("t")
    replay.create_table(innet.Table("t", {**COLUMNS, "frame": ("uint8", (4, 3))}, 100))
    with replay.writer("t", 1, VIEW) as writer:
        for t in range(12):
            writer.append(**{**step(t), "frame": np.full((1, 4, 3), t, np.uint8)})
    assert replay.sample("t", 4, VIEW, timeout=5).observation.shape == (4, 4, 4, 3)


def test_a_table_that_another_program_makes_anew_is_read_by_its_new_view(tmp_path: Path) -> None:
    def made(memory: innet.Memory, view: innet.NStep) -> None:
        memory.create_table(table(view=view))
        # No episode ends, so that every discount is the same.
        with memory.writer("t", 1) as writer:
            for t in range(20):
                writer.append(**step(t, episode=100))

    def view(n: int, gamma: float) -> innet.NStep:
        return innet.NStep(stack=4, n=n, gamma=gamma, observation="frame")

    with (
        innet.Memory() as memory,
        memory.serve(f"unix://{tmp_path}/s") as server,
        innet.connect(server.addresses[0]) as client,
    ):
        made(memory, view(3, 0.5))
        with client.batches("t", 4, prefetch=0) as batches, client.batches("t", 4, VIEW, prefetch=0) as named:
            assert set(next(batches).discount) == {0.125}
            next(named)
            # As many rows as before, and the same definition under another number.
            for gamma in (0.25, 0.25):
                memory.drop_table("t")
                made(memory, view(3, gamma))
                assert set(client.sample("t", 4).discount) == {gamma**3}
            for old in (batches, named):
                with pytest.raises(errors.UnknownTableError, match="it was dropped"):
                    # The first one was under way.
                    for _ in range(3):
                        next(old)
        # Without a call of `sample` meanwhile, whose new decoder the iterators could share.
        with client.batches("t", 4, prefetch=0) as batches:
            next(batches)
            memory.drop_table("t")
            made(memory, view(3, 0.125))
            with pytest.raises(errors.UnknownTableError, match="it was dropped"):
                for _ in range(3):
                    next(batches)
        with client.batches("t", 4, prefetch=0) as batches:
            assert set(next(batches).discount) == {0.125**3}
        # Fewer rows than the last view reads.
        memory.drop_table("t")
        made(memory, view(1, 0.5))
        with suppress(errors.ViewError):
            client.sample("t", 4)
        assert set(client.sample("t", 4).discount) == {0.5}


def test_a_sample_reads_no_files() -> None:
    counts = Path("/proc/self/io")
    if not counts.exists():
        pytest.skip("this system does not count the reads of a process")

    def reads() -> int:
        return int(re.findall(r"syscr: (\d+)", counts.read_text())[0])

    with innet.Memory([table()]) as replay:
        fill(replay, 20)
        replay.sample("t", 4, VIEW)
        before = reads()
        for _ in range(100):
            replay.sample("t", 4, VIEW)
        # Reads of the file that has the counts.
        assert reads() - before < 100


def test_the_arrays_of_a_batch(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 40, streams=2)
    batch = replay.sample("t", 16, VIEW, timeout=5)
    assert len(batch) == 16
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "observation": ("uint8", (16, 4, 12, 8)),
        "next_observation": ("uint8", (16, 4, 12, 8)),
        "reward": ("float32", (16,)),
        "discount": ("float32", (16,)),
        "action": ("int64", (16,)),
        "weights": ("float32", (16,)),
        "probabilities": ("float64", (16,)),
        "ids": ("uint64", (16,)),
        "ages": ("uint32", (16,)),
    }
    arrays = batch.as_dict()
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == expected
    assert arrays["action"] is batch.action
    assert set(arrays) <= set(dir(batch))
    arrays.clear()
    assert set(batch.as_dict()) == set(expected)
    with pytest.raises(AttributeError, match='no array "colour"; it has observation'):
        _ = batch.colour
    assert (batch.observation[:, -1, 0, 0] == batch.action).all()


def test_arrays_outlive_their_batch_and_their_replay(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 200)
    # Large enough for the pool of buffers, so that later samples would find a buffer given back too early.
    kept = [replay.sample("t", 256, VIEW, timeout=5) for _ in range(4)]
    arrays = [batch.next_observation[3:5] for batch in kept]
    copies = [array.copy() for array in arrays]
    del kept
    gc.collect()
    for _ in range(20):
        replay.sample("t", 256, VIEW, timeout=5)
    replay.close()
    del replay
    gc.collect()
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_buffers_are_used_again_when_their_last_array_is_gone() -> None:
    with innet.Memory([table()]) as replay:
        fill(replay, 200)
        addresses = set()
        for _ in range(20):
            addresses.add(replay.sample("t", 256, VIEW).observation.__array_interface__["data"][0])
        assert len(addresses) < 5


def test_observations_share_the_window_buffer() -> None:
    with innet.Memory([table()]) as replay:
        fill(replay, 200)
        batch = replay.sample("t", 64, VIEW)
        assert np.shares_memory(batch.observation, batch.next_observation)
        assert batch.observation.base is not None


def test_priorities_decide_what_is_sampled(make_replay: MakeReplay) -> None:
    replay = make_replay([table(priority_exponent=1.0)])
    fill(replay, 40, priority=1.0)
    first = replay.sample("t", 60, VIEW, timeout=5)
    chosen, action = first.ids[0], first.action[0]
    seen = np.unique(first.ids)
    receipt = replay.update_priorities("t", seen, np.where(seen == chosen, 2.0, 0.0))
    assert (receipt.applied, receipt.stale) == (len(seen), 0)
    # Of the items seen only the chosen one still has mass: 2, beside 1 for each that was not seen.
    batch = replay.sample("t", 200, VIEW, timeout=5)
    again = np.isin(batch.ids, seen)
    assert again.any()
    assert (batch.ids[again] == chosen).all()
    assert (batch.action[again] == action).all()
    np.testing.assert_allclose(batch.probabilities[again], 2 / (2 + 40 - len(seen)), rtol=1e-4)
    np.testing.assert_allclose(batch.probabilities[~again], 1 / (2 + 40 - len(seen)), rtol=1e-4)


def test_the_priority_exponent_is_applied_once(make_replay: MakeReplay) -> None:
    replay = make_replay([table(priority_exponent=0.5)])
    with replay.writer("t", 1, innet.NStep(stack=4, n=1, observation="frame")) as writer:
        for t in range(10):
            writer.append(**step(t, priority=np.array([float((t + 1) ** 2)])))
    batch = replay.sample("t", 500, innet.NStep(stack=4, n=1, observation="frame"), timeout=5)
    np.testing.assert_allclose(batch.probabilities, (batch.action + 1) / 55, rtol=1e-4)


def test_priorities_outside_the_range_of_a_table_are_stored_at_its_ends_and_counted(make_replay: MakeReplay) -> None:
    fine = table("fine", priority_exponent=1.0, priority_unit_log2=-30)
    replay = make_replay([table(priority_exponent=1.0), fine, table("root", priority_exponent=0.5)])

    def counted(name: str = "t") -> tuple[int, int]:
        stats = replay.stats()["tables"][name]
        return stats["rounded_up_priorities"], stats["saturated_priorities"]

    fill(replay, 20, priority=1.0)
    ids = np.unique(replay.sample("t", 64, VIEW, timeout=5).ids)[:4]
    assert counted() == (0, 0)
    # The unit is 2^-19, 1.9e-6; 0 is no priority.
    replay.update_priorities("t", ids, np.array([1e-7, 1e-300, 0.0, 2.0**-19]))
    assert counted() == (2, 0)
    assert replay.stats()["tables"]["t"]["items_with_mass"] == 19
    assert replay.stats()["tables"]["t"]["total_mass"] == pytest.approx(16 + 3 * 2.0**-19, abs=1e-9)
    replay.update_priorities("t", ids, np.array([3e6, 1e6, 2e-6, 1e-6]))
    assert counted() == (3, 1)
    # Keys of evicted items are stale: nothing is stored.
    fill(replay, 1000, priority=1.0)
    assert replay.update_priorities("t", ids, np.full(4, 1e-7)).stale == 4
    assert counted() == (3, 1)
    # New items, too; with smaller units, and after the exponent, 1e-7 is within the range.
    for name in ("t", "fine", "root"):
        fill(replay, 20, name=name, priority=1e-7)
    assert (counted(), counted("fine"), counted("root")) == ((23, 1), (0, 0), (0, 0))
    fill(replay, 20, name="root", priority=1e-13)
    assert counted("root") == (20, 0)
    # Also below what float32 holds, in which steps are sent.
    fill(replay, 20, priority=1e-300)
    assert counted() == (43, 1)


def test_weights_follow_the_paper(make_replay: MakeReplay) -> None:
    replay = make_replay([table(priority_exponent=1.0)])
    with replay.writer("t", 1, innet.NStep(stack=4, n=1, observation="frame")) as writer:
        for t in range(10):
            writer.append(**step(t, priority=np.array([t + 1.0])))
    for normalize in ("batch", "memory"):
        batch = replay.sample(
            "t", 4, innet.NStep(stack=4, n=1, observation="frame"), beta=0.7, normalize=normalize, timeout=5
        )
        raw = (10 * batch.probabilities) ** -0.7
        largest = raw.max() if normalize == "batch" else (10 * (1 / 55)) ** -0.7
        np.testing.assert_allclose(batch.weights, raw / largest, rtol=1e-4)


def test_late_keys_are_counted_and_ignored(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=100)])
    fill(replay, 100)
    batches = [replay.sample("t", 32, VIEW, timeout=5) for _ in range(3)]
    fill(replay, 100)
    for batch in batches:
        receipt = replay.update_priorities("t", batch.ids, np.full(32, 1e5))
        assert (receipt.applied, receipt.stale) == (0, 32)
    # The newcomers in the same places kept their priorities.
    assert replay.sample("t", 64, VIEW, timeout=5).probabilities.max() < 0.05


def test_the_last_priority_of_a_key_counts(make_replay: MakeReplay) -> None:
    replay = make_replay([table(priority_exponent=1.0)])
    fill(replay, 10, priority=1.0)
    key = replay.sample("t", 1, VIEW, timeout=5).ids[0]
    receipt = replay.update_priorities("t", [key, key], [1000.0, 91.0])
    assert receipt.stale == 0
    batch = replay.sample("t", 50, VIEW, timeout=5)
    np.testing.assert_allclose(batch.probabilities[batch.ids == key], 0.91, rtol=1e-4)


def test_a_queue_gives_each_item_once_and_in_order(make_replay: MakeReplay) -> None:
    replay = make_replay([table(sampler="fifo", max_times_sampled=1)])
    fill(replay, 30)
    first = replay.sample("t", 20, VIEW, timeout=5)
    rest = replay.sample("t", 20, VIEW, allow_short=True, timeout=0)
    assert np.concatenate([first.action, rest.action]).tolist() == list(range(30))
    with pytest.raises(errors.DeadlineError):
        replay.sample("t", 1, VIEW, timeout=0)


@pytest.mark.parametrize("sampler", ["lifo", "max_heap", "min_heap"])
def test_the_newest_the_highest_or_the_lowest_comes_first(
    make_replay: MakeReplay, sampler: Literal["lifo", "max_heap", "min_heap"]
) -> None:
    replay = make_replay([table(sampler=sampler, max_times_sampled=1)])
    assert replay.table("t").sampler == sampler
    priorities = [float(t * 7 % 10) for t in range(10)]
    with replay.writer("t", 1, VIEW) as writer:
        for t, priority in enumerate(priorities):
            writer.append(**step(t, priority=np.array([priority])))
    batch = replay.sample("t", 10, VIEW, timeout=5)
    by_priority = sorted(range(10), key=lambda t: priorities[t])
    expected = {"lifo": list(range(9, -1, -1)), "max_heap": by_priority[::-1], "min_heap": by_priority}
    assert batch.action.tolist() == expected[sampler]
    assert batch.probabilities.tolist() == [1.0] * 10
    assert replay.stats()["tables"]["t"]["items"] == 0


def test_ranks_of_priorities_decide_probabilities_and_weights(make_replay: MakeReplay) -> None:
    view = innet.NStep(stack=4, n=1, observation="frame")
    replay = make_replay([table(sampler="rank_based", priority_exponent=0.7, capacity=12)])
    assert replay.table("t").sampler == "rank_based"
    priorities = {t: float(t * 7 % 10) ** 3 for t in range(10)}

    def check() -> innet.Batch:
        """Ranks are those of `priorities`, by step; the lowest of them is 0."""
        ranked = sorted(priorities, key=lambda t: -priorities[t])
        shares = np.arange(1, len(ranked) + 1) ** -0.7
        shares /= shares.sum()
        counts = np.zeros(len(ranked))
        for normalize in ("batch", "memory"):
            for _ in range(20):
                batch = replay.sample("t", 100, view, beta=0.5, normalize=normalize, timeout=5)
                ranks = np.array([ranked.index(t) for t in batch.action])
                counts += np.bincount(ranks, minlength=len(ranked))
                np.testing.assert_allclose(batch.probabilities, shares[ranks], rtol=1e-9)
                np.testing.assert_allclose(batch.weights, (shares[-1] / shares[ranks]) ** 0.5, rtol=1e-5)
        # A batch has one item of each of 100 equal parts: it is off by less than one for each end of a rank's part.
        assert (np.abs(counts - 4_000 * shares) <= 80).all()
        return batch

    with replay.writer("t", 1, view, chunk_steps=2) as writer:
        for t, priority in priorities.items():
            writer.append(**step(t, priority=np.array([priority])))
        writer.flush()
        batch = check()
        new = {int(t): float(t + 50) for t in batch.action[::2]}
        priorities |= new
        ids = {int(t): batch.ids[batch.action == t][0] for t in new}
        replay.update_priorities("t", np.array(list(ids.values())), np.array(list(new.values())))
        check()
        # The oldest ones give way.
        for t in range(10, 20):
            priorities[t] = 40.0 + t * 3 % 11 + t / 100
            writer.append(**step(t, priority=np.array([priorities[t]])))
    live = replay.sample("t", 1_000, view, timeout=5).action
    priorities = {t: priority for t, priority in priorities.items() if t in live}
    assert len(priorities) == replay.stats()["tables"]["t"]["items"] < 12
    check()


def test_each_item_is_sampled_once_by_rank(make_replay: MakeReplay) -> None:
    replay = make_replay([table(sampler="rank_based", max_times_sampled=1)])
    fill(replay, 30)
    batches = [replay.sample("t", 10, VIEW, timeout=5).action for _ in range(3)]
    assert sorted(np.concatenate(batches)) == list(range(30))
    with pytest.raises(errors.DeadlineError):
        replay.sample("t", 1, VIEW, timeout=0)


def test_a_sample_waits_for_a_writer(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=20)])
    batches: list[innet.Batch] = []
    reader = threading.Thread(target=lambda: batches.append(replay.sample("t", 4, VIEW, timeout=30)))
    reader.start()
    fill(replay, 40)
    reader.join()
    assert len(batches[0]) == 4


def test_a_deadline_says_who_is_waited_for(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=20)])
    fill(replay, 10)
    for timeout in (0, 0.05):
        with pytest.raises(errors.DeadlineError, match="20") as caught:
            replay.sample("t", 4, VIEW, timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
    with pytest.raises(errors.ConfigError, match="timeout"):
        replay.sample("t", 4, VIEW, timeout=-1)


def test_the_rate_limiter_stops_whoever_runs_ahead(make_replay: MakeReplay) -> None:
    replay = make_replay([table(samples_per_insert=2.0, slack=20.0)])
    writer = replay.writer("t", 1, VIEW, chunk_steps=1)

    def insert(t: int) -> None:
        writer.append(**step(t), timeout=0.5)
        writer.flush(timeout=0.5)

    def repeat(call: Callable[[int], object]) -> int:
        """How often `call` works before its deadline."""
        for t in range(1000):
            try:
                call(t)
            except errors.DeadlineError:
                return t
        raise AssertionError("nothing stopped it")

    # The windows of the last 3 steps are open: 13 steps insert 10 items, worth the slack of 20 samples.
    assert 10 <= repeat(insert) <= 14
    sampled = repeat(lambda _: replay.sample("t", 1, VIEW, timeout=0))
    assert 36 <= sampled <= 44
    writer.close(timeout=5)


def test_many_threads_use_one_replay(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=5000)])
    fill(replay, 50)
    failures: list[BaseException] = []

    def write() -> None:
        fill(replay, 200, streams=3)

    def sample() -> None:
        for _ in range(50):
            batch = replay.sample("t", 16, VIEW, timeout=10)
            assert (batch.observation[:, -1, 0, 0] == batch.action % 256).all()
            replay.update_priorities("t", batch.ids, batch.probabilities)

    def guarded(work: Any) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (write, write, sample, sample)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_statistics_count(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=110, priority_exponent=0.5)])
    fill(replay, 80, streams=2, priority=4.0)
    key = replay.sample("t", 8, VIEW, timeout=5).ids
    newest = int(key.max())
    assert replay.update_priorities("t", [newest, newest + 2**40], [9.0, 1.0]).stale == 1
    replay.put_parameters("p", {"a": np.zeros(3)})
    stats = replay.stats()
    counted = stats["tables"]["t"]
    # Episodes end by terminating: every step starts a transition.
    assert counted["inserted_steps"] == counted["inserted_items"] == 160
    assert counted["steps"] == counted["items"] == counted["items_with_mass"] == 160 - counted["evicted_steps"]
    assert counted["steps"] <= counted["capacity"] == 110
    assert counted["evicted_items"] == counted["evicted_steps"]
    assert (counted["sampled_items"], counted["limiter_sampled"]) == (8, 8)
    assert (counted["updated_priorities"], counted["stale_updates"]) == (1, 1)
    assert counted["max_priority"] == 9.0
    assert counted["total_mass"] == pytest.approx(2.0 * (counted["items"] - 1) + 3.0)
    assert counted["bytes"] == counted["live_bytes"] == stats["bytes"] > 0
    assert counted["corrupt_items"] == counted["late_items"] == 0
    assert stats["parameters"]["p"]["version"] == 1


def test_unread_items_of_a_full_queue_are_counted_and_logged_once(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table(capacity=100, sampler="fifo", max_times_sampled=1), table("other", capacity=100)])
    for name in ("t", "other"):
        fill(replay, 500, name=name)
    tables = replay.stats()["tables"]
    assert tables["t"]["evicted_unread_items"] == tables["t"]["evicted_items"] == 500 - tables["t"]["items"] > 0
    assert tables["other"]["evicted_unread_items"] == 0
    log.wait_for('table "t" is full, and has evicted')
    assert sum("before their last sample" in line for line in log.lines) == 1


def test_rollouts_of_a_queue_wait_for_their_reader(make_replay: MakeReplay) -> None:
    view = innet.Sequences(25, observation="frame")
    limits: dict[str, Any] = {"sampler": "fifo", "max_times_sampled": 1, "samples_per_insert": 1.0}
    replay = make_replay([table(capacity=1000, view=view, **limits)])

    def write() -> None:
        with replay.writer("t", 1, chunk_steps=5) as writer:
            for t in range(100 * 25):
                writer.append(**step(t, episode=25), timeout=60)

    with ThreadPoolExecutor() as pool:
        written = pool.submit(write)
        # The reader comes late.
        until(lambda: replay.stats()["tables"]["t"]["waiting_pushes"] == 1)
        actions = [int(replay.sample("t", 1).action[0, 0]) for _ in range(100)]
        written.result()
    assert actions == list(range(0, 2500, 25))
    assert replay.stats()["tables"]["t"]["evicted_unread_items"] == 0


def test_closing_ends_every_use(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay:
        fill(replay, 20)
    for use in (
        lambda: replay.stats(),
        lambda: replay.tables(),
        lambda: replay.parameters(),
        lambda: replay.sample("t", 1, VIEW),
        lambda: replay.writer("t", 1, VIEW),
        lambda: replay.get_parameters("p"),
    ):
        with pytest.raises(errors.ClosedError, match="replay is closed"):
            use()
    replay.close()
    assert "closed" in repr(replay)


def test_a_writer_closes_and_counts(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    writer = replay.writer("t", 2, VIEW, name="actor-7")
    for t in range(25):
        writer.append(**step(t, 2))
    writer.flush(timeout=5)
    assert "actor-7" in repr(writer)
    assert writer.steps == 50
    # Of the last episode's five steps the last three have no observation yet to bootstrap from.
    assert writer.items == 2 * 22
    assert writer.dropped_windows == 0
    # A reset that no end announced.
    writer.append(**{**step(25, 2), "first": True})
    assert writer.dropped_windows == 6
    writer.close(timeout=5)
    writer.close()
    with pytest.raises(errors.ClosedError, match="writer is closed"):
        writer.append(**step(26, 2))


def test_a_writer_whose_pushes_cannot_fit_is_not_opened(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=500)])
    with pytest.raises(errors.ConfigError, match=r"up to 816 steps at once.*holds 500.*smaller chunk_steps"):
        replay.writer("t", 16, VIEW)
    replay.writer("t", 16, VIEW, chunk_steps=30).close()


def test_a_writer_is_read_and_interrupted_while_another_thread_appends(make_replay: MakeReplay) -> None:
    replay = make_replay([table(samples_per_insert=1.0, slack=10.0)])
    writer = replay.writer("t", 1, VIEW, chunk_steps=1)

    def append() -> None:
        for t in range(30):
            writer.append(**step(t))
            writer.flush()

    appending = threading.Thread(target=append)
    appending.start()
    while replay.stats()["tables"]["t"]["blocked_pushes"] == 0:
        pass
    # The slack allows 10 items, and the windows of 3 steps are open; one more step waits.
    assert 10 <= writer.items <= writer.steps <= 15
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            writer.flush()
    finally:
        signal.signal(signal.SIGALRM, before)
    while appending.is_alive():
        with suppress(errors.DeadlineError):
            replay.sample("t", 1, VIEW, timeout=0.05)
    writer.close(timeout=5)
    assert writer.steps == 30


def test_replays_say_where_they_are(make_replay: MakeReplay) -> None:
    replay = make_replay()
    assert repr(replay).startswith(("<Memory in this process>", "<Replay at "))


def test_a_replay_is_not_pickled(make_replay: MakeReplay) -> None:
    with pytest.raises(TypeError, match=r"innet_drl\.connect"):
        pickle.dumps(make_replay())


def test_definitions_are_values() -> None:
    values = [
        innet.Column("float32", (3, 4), "none"),
        table(min_size=7, sampler="fifo", max_times_sampled=2),
        innet.NStep(stack=4, n=3, gamma=0.5, observation="pixels", padding="repeat"),
        innet.Sequences(20, burn_in=10, period=5, stack=4, gamma=0.9, state=("h",)),
        innet.Window(2, 3),
    ]
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value
        assert eval(repr(value), vars(innet)) == value
    assert innet.Column("uint8", (8, 8)).codec == "lz4"
    assert innet.Column("float32").codec == "none"
    assert innet.Sequences(20).period == 20
    assert innet.Table("t", {"a": innet.Column(np.float16), "b": ("int8", 3), "c": bool}, 10).columns == {
        "a": innet.Column("float16", ()),
        "b": innet.Column("int8", (3,)),
        "c": innet.Column("bool", ()),
    }


def test_a_table_has_the_view_of_calls_that_name_none(make_replay: MakeReplay) -> None:
    sequences = innet.Sequences(4, period=2, observation="frame", state=("action",))
    own = [table("a", view=VIEW), table("b", view=sequences), table("c", view=innet.Window(1, 2)), table("d")]
    replay = make_replay(own)
    assert [replay.table(each.name).view for each in own] == [VIEW, sequences, innet.Window(1, 2), None]
    # A definition without a view asks for any; one with another view differs.
    replay.create_table(table("a"))
    for asked in (innet.Window(1, 2), sequences, innet.Sequences(4, observation="frame")):
        with pytest.raises(errors.TableDiffersError) as caught:
            replay.create_table(table("a", view=asked))
        assert str(caught.value).endswith(f"definition: view is {VIEW!r}, asked for {asked!r}")
    wanted = table("d", sampler="uniform", live_max_priority=True)
    with pytest.raises(errors.TableDiffersError) as caught:
        replay.create_table(wanted)
    assert str(caught.value).endswith(
        "sampler is prioritized, asked for uniform; live_max_priority is False, asked for True"
    )
    columns: dict[str, Any] = {"frame": innet.Column("uint8", (12, 8), "zstd"), "action": "int64"}
    with pytest.raises(errors.TableDiffersError) as caught:
        replay.create_table(innet.Table("d", columns, 1000))
    assert str(caught.value).endswith(
        "columns is [frame: uint8 (12, 8) lz4, reward: float32 () none], asked for [frame: uint8 (12, 8) zstd]"
    )
    two, reverse = {"a": "int64", "b": "int64"}, {"b": "int64", "a": "int64"}
    replay.create_table(innet.Table("e", two, 1000))
    with pytest.raises(errors.TableDiffersError, match=r"columns is \[a: .*, b: .*\], asked for \[b: .*, a: .*\]"):
        replay.create_table(innet.Table("e", reverse, 1000))
    for each in own[:3]:
        with replay.writer(each.name, 1) as writer:
            for t in range(20):
                writer.append(**step(t))
        named, unnamed = replay.sample(each.name, 16, each.view), replay.sample(each.name, 16)
        shapes = [{name: array.shape for name, array in batch.as_dict().items()} for batch in (named, unnamed)]
        assert shapes[0] == shapes[1]
        with replay.batches(each.name, 16) as batches:
            assert next(batches).as_dict().keys() == named.as_dict().keys()
    assert replay.sample("a", 4, innet.NStep(stack=2, n=1, observation="frame")).observation.shape[1] == 2
    for call in (lambda: replay.writer("d", 1), lambda: replay.sample("d", 1), lambda: replay.batches("d", 1)):
        with pytest.raises(errors.ConfigError, match='table "d" has no view of its own'):
            call()
    with pytest.raises(errors.SchemaError, match="observation"):
        innet.Table("e", {"action": "int64", "reward": "float32"}, 10, view=innet.NStep())
