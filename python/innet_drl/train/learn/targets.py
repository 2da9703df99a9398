"""Targets of the next batch in a second thread, for a learner on a CPU."""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
from collections.abc import Iterator
from typing import Self

import torch

from innet_drl.errors import DeadlineError
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.learn.learner import Learner, use_device
from innet_drl.train.observe.stopwatch import Stopwatch, TimedBatches

POLL_SECONDS = 0.05
"""Period at which the end of `TargetsAhead` looks whether its thread has ended."""


class TargetsAhead:
    """Wraps an iterator over batches and adds their targets, computed by a second thread. Use it as a context manager.

    An update of double Q-learning has three forward passes and one backward pass. Two forward passes, over the next
    observations, need no gradient: a second core computes them for the next batch during the current update. Next
    actions are then chosen by the online network of one or two updates earlier.

    After a `DeadlineError` of the batches the iterator continues; any other error ends it.
    """

    def __init__(self, learner: Learner, batches: Iterator[TorchBatch]) -> None:
        self.stopwatch = Stopwatch()
        """Times of the thread."""
        self._learner = learner
        self._batches = TimedBatches(batches, self.stopwatch)
        self._ready: queue.Queue[TorchBatch | Exception] = queue.Queue(maxsize=1)
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(torch.get_num_threads(),), name="targets", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TorchBatch:
        result = self._failure or self._ready.get()
        if isinstance(result, TorchBatch):
            return result
        if not isinstance(result, DeadlineError):
            self._failure = result
        raise result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Drops a finished batch.
        self._stopped.set()
        while self._thread.is_alive():
            # The thread may be waiting for space in the queue.
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(POLL_SECONDS)

    def _run(self, threads: int) -> None:
        # The number of threads is a setting of each thread.
        torch.set_num_threads(threads)
        use_device(self._learner.device)
        chooser = copy.deepcopy(self._learner.network).requires_grad_(False)
        while not self._stopped.is_set():
            try:
                batch = next(self._batches)
                self._learner.copy_network(chooser)
                batch = self._learner.with_targets(batch, chooser)
                self.stopwatch.lap("targets")
                self._ready.put(batch)
                self.stopwatch.lap("wait for the learner")
            except DeadlineError as error:
                self._ready.put(error)
            except Exception as error:
                self._ready.put(error)
                return
