"""Iterators of batches: prefetching, timeouts, devices, threads."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import Server, until
from steps import VIEW, fill, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors


def test_batches_prefetch_and_close(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 100)
    for prefetch in (0, 1, 4):
        with replay.batches("t", 32, VIEW, prefetch=prefetch, timeout=5) as batches:
            assert iter(batches) is batches
            for _, batch in zip(range(10), batches, strict=False):
                assert batch.observation.shape == (32, 4, 12, 8)
            assert "32 items" in repr(batches)
        with pytest.raises(errors.ClosedError):
            next(batches)
        batches.close()


def test_without_prefetch_each_batch_is_sampled_when_it_is_asked_for(make_replay: MakeReplay) -> None:
    """A batch follows the updates before it, and a closed iterator has taken no item of a queue."""
    queue = table("queue", sampler="fifo", max_times_sampled=1)
    replay = make_replay([table(priority_exponent=1.0), queue])
    fill(replay, 20)
    fill(replay, 20, name="queue")
    with replay.batches("t", 4, VIEW, prefetch=0, timeout=10) as batches:
        for _ in range(5):
            ids = replay.sample("t", 256, VIEW).ids
            chosen = next(batches).ids[0]
            assert replay.update_priorities("t", np.append(ids, chosen), np.append(np.zeros(256), 1.0)).stale == 0
            assert set(next(batches).ids) == {chosen}
            replay.update_priorities("t", ids, np.ones(256))
    with replay.batches("queue", 4, VIEW, prefetch=0, timeout=10) as batches:
        first = next(batches)
    assert replay.stats()["tables"]["queue"]["sampled_items"] == 4
    rest = replay.sample("queue", 16, VIEW, timeout=10)
    assert [*first.action, *rest.action] == list(range(20))


def check_whole_queue(replay: innet.Replay) -> None:
    """Asserts that no request of an earlier `next` takes items of the queue."""
    until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 0)
    fill(replay, 20)
    assert list(replay.sample("t", 20, VIEW, timeout=10).action) == list(range(20))


def test_without_prefetch_an_interrupted_next_takes_no_item_of_a_queue(make_replay: MakeReplay) -> None:
    replay = make_replay([table(sampler="fifo", max_times_sampled=1)])
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 1)
        signal.pthread_kill(main, signal.SIGINT)

    with replay.batches("t", 2, VIEW, prefetch=0, timeout=None) as batches:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        thread.join()
        check_whole_queue(replay)
        fill(replay, 20)
        assert len(next(batches)) == 2


def test_without_prefetch_a_server_that_does_not_answer_in_time_takes_no_item_of_a_queue() -> None:
    """The server gets the request after the client's deadline, and may wait for as long again."""
    with Server("innet://127.0.0.1:0") as server, innet.connect(server.address, grace=0.1) as replay:
        replay.create_table(table(sampler="fifo", max_times_sampled=1))
        connections = replay.stats()["server"]["connections"]
        with replay.batches("t", 2, VIEW, prefetch=0, timeout=2) as batches:
            with pytest.raises(errors.DeadlineError, match="holds 0 items"):
                next(batches)
            server.send(signal.SIGSTOP)
            try:
                with pytest.raises(errors.DeadlineError, match="did not answer"):
                    next(batches)
            finally:
                server.send(signal.SIGCONT)
            until(lambda: replay.stats()["server"]["connections"] == connections)
            check_whole_queue(replay)


def test_batches_wait_no_longer_than_their_timeout(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=50)])
    for prefetch in (0, 2):
        with replay.batches("t", 4, VIEW, prefetch=prefetch, timeout=0.5) as batches:
            with pytest.raises(errors.DeadlineError, match="50"):
                next(batches)
    # A deadline is not the end: the same iterator continues when there is something to sample.
    with replay.batches("t", 4, VIEW, timeout=0.3) as batches:
        with pytest.raises(errors.DeadlineError):
            next(batches)
        fill(replay, 60)
        while True:
            try:
                assert len(next(batches)) == 4
                break
            except errors.DeadlineError:
                continue


def test_batches_may_be_short_at_the_deadline(make_replay: MakeReplay) -> None:
    """Each `next` decides by its own deadline, whatever the iterator was asked before."""
    replay = make_replay([table(sampler="fifo", max_times_sampled=1)])
    fill(replay, 20)
    with replay.batches("t", 30, VIEW, allow_short=True, timeout=0.2) as batches:
        assert len(next(batches)) == 20
        with pytest.raises(errors.DeadlineError, match="holds 0 items"):
            next(batches)
        fill(replay, 40)
        assert len(next(batches)) == 30
        assert len(next(batches)) == 10


def test_a_sample_on_a_device_is_the_sample(make_replay: MakeReplay) -> None:
    torch = pytest.importorskip("torch")
    replay = make_replay([table(sampler="fifo", max_times_sampled=2)])
    fill(replay, 20)
    arrays, tensors = replay.sample("t", 1, VIEW), replay.sample("t", 1, VIEW, device=torch.device("cpu"))
    assert list(tensors.as_dict()) == list(arrays.as_dict())
    for name, tensor in tensors.as_dict().items():
        np.testing.assert_array_equal(np.asarray(tensor), arrays.as_dict()[name])
        assert torch.is_tensor(tensor) == (name != "ids")
    assert replay.update_priorities("t", tensors.ids, tensors.weights).applied == 0


def test_a_device_that_is_not_there_is_named(make_replay: MakeReplay) -> None:
    pytest.importorskip("torch")
    replay = make_replay([table()])
    calls: list[Callable[[str], Any]] = [
        lambda device: replay.sample("t", 1, VIEW, device=device),
        lambda device: replay.batches("t", 1, VIEW, device=device),
        lambda device: replay.get_parameters("p", device=device),
    ]
    for call in calls:
        with pytest.raises(errors.ConfigError, match=r"device is None, \"cpu\", .*got 'gpu'"):
            call("gpu")
        with pytest.raises(errors.ConfigError, match=r"torch finds (no|\d+) CUDA devices? on this machine"):
            call("cuda:99")


def test_batches_raise_what_fails_in_the_background(make_replay: MakeReplay) -> None:
    replay = make_replay([table(priority_exponent=1.0)])
    fill(replay, 20, priority=0.0)
    with replay.batches("t", 4, VIEW, timeout=5) as batches:
        with pytest.raises(errors.EmptyError, match="priority"):
            next(batches)
        with pytest.raises(errors.ClosedError):
            next(batches)


def test_an_iterator_whose_schedule_refers_to_its_owner_is_collected() -> None:
    class Learner:
        def __init__(self, replay: innet.Memory) -> None:
            self.batches = replay.batches("t", 4, VIEW, beta=self.beta)

        def beta(self) -> float:
            return 0.5

    with innet.Memory([table()]) as replay:
        fill(replay, 20)
        learner = Learner(replay)
        next(learner.batches)
        left = weakref.ref(learner)
        del learner
        gc.collect()
        assert left() is None


def test_batches_ask_the_schedule_for_beta() -> None:
    with innet.Memory([table(priority_exponent=1.0)]) as replay:
        with replay.writer("t", 1, innet.NStep(stack=4, n=1, observation="frame")) as writer:
            for t in range(10):
                writer.append(**step(t, priority=np.array([t + 1.0])))
        betas = iter([0.0, 0.0, 1.0])
        view = innet.NStep(stack=4, n=1, observation="frame")
        with replay.batches("t", 64, view, prefetch=0, beta=lambda: next(betas)) as batches:
            assert (next(batches).weights == 1).all()
            batch = next(batches)
            np.testing.assert_allclose(batch.weights, batch.probabilities.min() / batch.probabilities, rtol=1e-4)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_schedule_that_ends_is_an_error_of_beta(prefetch: int, device: Any) -> None:
    with innet.Memory([table()]) as replay:
        fill(replay, 20)
        betas = iter([0.4, 0.5, 0.6])
        batches = replay.batches("t", 4, VIEW, prefetch=prefetch, beta=lambda: next(betas), device=device)
        with batches, pytest.raises(errors.ConfigError, match=r"^beta is .* raised StopIteration") as raised:
            for _ in batches:
                pass
        assert isinstance(raised.value.__cause__, StopIteration)
        with pytest.raises(errors.ConfigError, match=r"^beta is"):
            replay.batches("t", 4, VIEW, beta=lambda: next(betas))


def test_undelivered_batches_give_their_samples_back() -> None:
    with innet.Memory([table(samples_per_insert=1.0, slack=32.0)]) as replay:
        with replay.writer("t", 1, VIEW) as writer:
            for t in range(30):
                writer.append(**step(t))
        with replay.batches("t", 4, VIEW, prefetch=4, timeout=5) as batches:
            next(batches)
        # 30 inserted and 32 of slack allow 62 samples: 4 are used, and 14 more batches have to fit.
        for _ in range(14):
            replay.sample("t", 4, VIEW, timeout=1)
        with pytest.raises(errors.DeadlineError):
            replay.sample("t", 4, VIEW, timeout=0)


def test_batches_on_the_cpu_share_memory_with_torch(make_replay: MakeReplay) -> None:
    torch = pytest.importorskip("torch")
    replay = make_replay([table()])
    fill(replay, 100)
    with replay.batches("t", 32, VIEW, device="cpu", timeout=5) as batches:
        batch = next(batches)
    assert len(batch) == 32
    assert batch.observation.dtype == torch.uint8
    assert batch.observation.shape == (32, 4, 12, 8)
    shared = batch.observation.untyped_storage().data_ptr(), batch.observation.untyped_storage().nbytes()
    assert shared[0] <= batch.next_observation.data_ptr() < shared[0] + shared[1] + 32 * 8 * 96
    assert replay.update_priorities("t", batch.ids, batch.weights).stale == 0
    with pytest.raises(AttributeError, match="no array"):
        _ = batch.colour


class Lender:
    """Ordinary buffers in place of page-locked ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[NDArray[np.uint8]] = []
        self.module = pytest.importorskip("innet_drl.torch_batches")
        monkeypatch.setattr(self.module, "lender", lambda device: self.lend)

    def lend(self, size: int) -> NDArray[np.uint8] | None:
        buffer = np.empty(size + 64, np.uint8)
        self.buffers.append(buffer[-buffer.ctypes.data % 64 :][:size])
        return self.buffers[-1]

    def has(self, address: int) -> bool:
        return any(0 <= address - buffer.ctypes.data < buffer.nbytes for buffer in self.buffers)


def test_batches_are_decoded_into_lent_memory(make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder writes into the lent memory, and the tensors share it: nothing is copied on the host."""
    lender = Lender(monkeypatch)
    replay = make_replay([table()])
    fill(replay, 100)
    with replay.batches("t", 1024, VIEW, prefetch=2, device="cpu", timeout=5) as batches:
        for _ in range(40):
            batch = next(batches)
            assert all(lender.has(tensor.data_ptr()) for name, tensor in batch.items() if name != "ids")
            assert (batch.observation[:, -1, 0, 0] == batch.action).all()
        # From here a GPU copies.
        source, _ = next(batches._batches)._memory()
        assert lender.has(source.ctypes.data)
        assert lender.has(source.ctypes.data + source.nbytes - 1)
    # One is read, one was read before, and two are decoded ahead.
    assert 1 <= len(lender.buffers) <= 4
    lent = len(lender.buffers)
    for _ in range(3):
        assert lender.has(replay.sample("t", 1024, VIEW, device="cpu").observation.data_ptr())
    assert len(lender.buffers) == lent
    assert not lender.has(replay.sample("t", 1024, VIEW).observation.ctypes.data)


def test_lent_memory_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender(monkeypatch)
    with innet.Memory([table()]) as replay:
        fill(replay, 100)
        kept = replay.sample("t", 1024, VIEW, device="cpu")
    left = [weakref.ref(buffer) for buffer in lender.buffers]
    lender.buffers.clear()
    gc.collect()
    assert (kept.observation[:, -1, 0, 0] == kept.action).all()
    assert [ref() is None for ref in left] == [False]
    # A replay keeps the memory of finished batches for the next ones.
    del kept, replay
    gc.collect()
    assert [ref() is None for ref in left] == [True]


def test_memory_that_is_not_lent_is_the_core_s_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A system that refuses to lock pages is named once; an interrupt meanwhile ends the call."""
    lender = Lender(monkeypatch)
    torch = pytest.importorskip("torch")
    page_locked = lender.module._page_locked
    asked: list[int] = []

    def refuse(size: int, **_: object) -> None:
        asked.append(size)
        raise RuntimeError("CUDA error: out of memory\nCompile with ...")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    def fail(_: int) -> None:
        raise ValueError("no memory of this kind")

    with innet.Memory([table()]) as replay:
        fill(replay, 100)

        def check() -> None:
            batch = replay.sample("t", 1024, VIEW, device="cpu")
            assert (batch.observation[:, -1, 0, 0] == batch.action).all()

        monkeypatch.setattr(lender, "lend", page_locked)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", refuse)
            patched.setattr(lender.module, "_refused", False)
            check()
            with innet.Memory([table()]) as other:
                fill(other, 100)
                other.sample("t", 1024, VIEW, device="cpu")
        assert len(asked) == 1
        assert [record.message.partition(": ")[2] for record in caplog.records] == [
            f"{asked[0]} bytes could not be page-locked: CUDA error: out of memory"
        ]
    for lend in (interrupt, fail):
        monkeypatch.setattr(lender, "lend", lend)
        with innet.Memory([table()]) as replay:
            fill(replay, 100)
            if lend is interrupt:
                with pytest.raises(KeyboardInterrupt):
                    check()
            else:
                printed: list[Any] = []
                monkeypatch.setattr(sys, "unraisablehook", printed.append)
                check()
                assert [str(unraisable.exc_value) for unraisable in printed] == ["no memory of this kind"]


class Upload:
    """Copies to ordinary memory in place of a device's, and the threads that began them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = pytest.importorskip("innet_drl.torch_batches")
        self.threads: list[int] = []
        self.awaited: list[Any] = []
        self.error: Exception | None = None
        monkeypatch.setattr(self.module, "upload_to", lambda device: self)

    def __call__(self, batch: innet.Batch) -> tuple[Any, Any, str]:
        self.threads.append(threading.get_ident())
        if self.error is not None:
            raise self.error
        flat, layout = batch._memory()
        on_device = self.module.torch.from_numpy(flat.copy())
        return self.module._tensors(batch, on_device, layout), on_device, "event"

    def wait(self, on_device: Any, copied: str) -> None:
        assert copied == "event"
        self.awaited.append(on_device)

    def finish(self) -> None:
        """Nothing to wait for."""


def test_a_copy_to_a_device_begins_before_its_batch_is_asked_for(
    make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(monkeypatch)
    replay = make_replay([table(), innet.Table.queue("q", {"action": innet.Column("int32", ())}, 100)])
    fill(replay, 100)
    with replay.batches("t", 32, VIEW, prefetch=2, device="cpu", timeout=5) as batches:
        until(lambda: len(upload.threads) == 2)
        kept = [next(batches) for _ in range(20)]
    assert threading.get_ident() not in upload.threads
    for batch, memory in zip(kept, upload.awaited, strict=True):
        assert (batch.observation[:, -1, 0, 0] == batch.action).all()
        assert batch.action.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    # Where nothing is decoded ahead, the reader begins it.
    with replay.batches("t", 32, VIEW, prefetch=0, device="cpu", timeout=5) as batches:
        assert len(next(batches)) == 32
    assert upload.threads[-1] == threading.get_ident()
    ends = np.zeros((8, 1), bool)
    with replay.writer("q", 1, innet.Window(0, 0)) as writer:
        writer.extend(action=np.arange(8, dtype=np.int32)[:, None], terminated=ends, truncated=ends)
    with replay.batches("q", 4, innet.Window(0, 0), prefetch=2, acknowledge=True, device="cpu", timeout=5) as batches:
        batch = next(batches)
        batch.acknowledge()
        with pytest.raises(errors.LeaseError):
            batch.acknowledge()


def test_an_iterator_may_be_collected_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Upload(monkeypatch)
    collecting = threading.Event()
    begin = Upload.__call__

    def collect(self: Upload, batch: innet.Batch) -> tuple[Any, Any, str]:
        assert collecting.wait(60)
        gc.collect()
        return begin(self, batch)

    monkeypatch.setattr(Upload, "__call__", collect)
    with innet.Memory([table()]) as replay:
        fill(replay, 100)
        gc.disable()
        try:
            batches = replay.batches("t", 32, VIEW, prefetch=1, device="cpu", timeout=5)
            batches.on_sample = lambda kept=batches: kept
            left = weakref.ref(batches)
            del batches
            collecting.set()
            until(lambda: left() is None)
        finally:
            gc.enable()
        assert len(replay.sample("t", 4, VIEW)) == 4
    assert threading.get_ident() not in upload.threads


def test_a_copy_that_fails_is_the_reader_s_error(make_replay: MakeReplay, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Upload(monkeypatch)
    upload.error = RuntimeError("CUDA error: out of memory")
    replay = make_replay([table()])
    fill(replay, 100)
    with replay.batches("t", 32, VIEW, prefetch=1, device="cpu", timeout=5) as batches:
        until(lambda: len(upload.threads) == 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            next(batches)
        assert threading.get_ident() in upload.threads
        # The reader goes on when there is room again.
        upload.error = None
        assert next(batches).reward.shape == (32,)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
def test_batches_on_a_cuda_device_equal_those_on_the_cpu() -> None:
    with innet.Memory([table()], seed=3) as replay:
        fill(replay, 100)
        with replay.batches("t", 32, VIEW, device="cuda", prefetch=2, timeout=5) as batches:
            kept = [next(batches) for _ in range(20)]
        for batch in kept:
            newest = batch.observation[:, -1, 0, 0].cpu().numpy()
            assert (newest == batch.action.cpu().numpy()).all()
            assert batch.reward.dtype.is_floating_point


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_take_turns_at_an_iterator_of_batches(make_replay: MakeReplay, prefetch: int) -> None:
    replay = make_replay([table(min_size=20)])
    sampled: list[innet.Batch] = []
    with replay.batches("t", 4, VIEW, prefetch=prefetch) as batches:
        readers = [threading.Thread(target=lambda: sampled.append(next(batches))) for _ in range(3)]
        for reader in readers:
            reader.start()
        fill(replay, 40)
        for reader in readers:
            reader.join()
    assert [len(batch) for batch in sampled] == [4, 4, 4]
