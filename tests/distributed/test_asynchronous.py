"""Asynchronous training through a real server: the same updates everywhere, old gradients dropped, weights pulled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from calls import Lines
from gradient_workers import Raised, gradient_process, gradient_server, returned, run_workers
from torch import nn

import innet_drl as innet
from innet_drl import errors
from innet_drl.distributed import Contributions, Replica
from innet_drl.train.learn.data_parallel import digest


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with gradient_server() as address:
        yield address


def model_and_optimizer(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    data = torch.randn(32, 6, generator=generator)
    loss: torch.Tensor = (model(data) - data.sum(1, keepdim=True)).square().mean()
    return loss


def train(
    worker: int, workers: int, server: str, job: str, settings: dict[str, Any], pause: float = 0.0
) -> tuple[bytes, float, Contributions]:
    """Trains to the job's last update; digest of the weights, last loss, what became of the gradients."""
    # Weights of another seed in each worker: all but the first one take those of the first.
    model, optimizer = model_and_optimizer(worker)
    generator = torch.Generator().manual_seed(worker)
    loss = torch.tensor(0.0)
    with Replica(model, optimizer, server, job, worker=worker, workers=workers, deadline=20, **settings) as replica:
        while not replica.finished:
            if worker == workers - 1:
                time.sleep(pause)
            optimizer.zero_grad()
            loss = loss_of(model, generator)
            torch.autograd.backward(loss)
            replica.step()
        replica.finish()
        assert replica.index == settings["updates"]
        return digest(model), loss.item(), replica.contributions


def test_replicas_take_the_same_updates_and_learn(server: str) -> None:
    settings = {"updates": 300, "check_period": 50, "staleness": 3}
    results = returned(run_workers(train, 3, server, "replicas", settings))
    assert len({digest for digest, _, _ in results}) == 1
    # The first loss is 6.
    assert max(loss for _, loss, _ in results) < 1.0
    offered = sum(told.offered for _, _, told in results)
    # Two gradients make an update, unless a part of one went into a later one.
    assert offered >= 300
    for _, _, told in results:
        assert told.counted + told.dropped <= told.offered <= told.counted + told.dropped + 1


def test_a_slow_worker_keeps_nobody_and_its_old_gradients_are_dropped(server: str) -> None:
    settings = {"updates": 400, "threshold": 1, "staleness": 1, "publish_period": 1}
    *fast, slow = returned(run_workers(train, 3, server, "slow", settings, 0.05))
    assert len({digest for digest, _, _ in (*fast, slow)}) == 1
    told = slow[2]
    assert told.dropped > 0 or told.restarts > 0
    # The first worker to start may have made most updates before the next one has begun.
    assert told.offered < max(of_fast.offered for _, _, of_fast in fast)


def train_and_disturb(worker: int, workers: int, server: str) -> None:
    model, optimizer = model_and_optimizer(0)
    generator = torch.Generator().manual_seed(worker)
    with Replica(
        model,
        optimizer,
        server,
        "disturbed",
        worker=worker,
        workers=workers,
        check_period=10,
        updates=1000,
        deadline=20,
    ) as replica:
        while not replica.finished:
            if worker == 1 and replica.index > 30:
                with torch.no_grad():
                    next(model.parameters()).view(-1)[0] += 1e-6
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(model, generator))
            replica.step()


def test_a_replica_with_other_weights_is_found_out(server: str) -> None:
    found = [result for result in run_workers(train_and_disturb, 2, server) if result is not None]
    assert all(isinstance(result, Raised) for result in found)
    # Who did not find it misses the one that did.
    kinds = {result.kind for result in found}
    assert "ReplicaError" in kinds
    assert kinds <= {"ReplicaError", "MissingWorkerError", "DeadlineError"}
    (told, *_) = [result.message for result in found if result.kind == "ReplicaError"]
    assert "other weights after update" in told


def test_a_new_replica_pulls_weights_and_optimizer(server: str, log: Lines) -> None:
    with innet.connect(server) as earlier:
        earlier.put_parameters("earlier.weights", {"weight": np.zeros(3, np.float32)})
    settings: dict[str, Any] = {"workers": 2, "threshold": 1, "updates": 30, "deadline": 20}
    model, optimizer = model_and_optimizer(0)
    late, its_optimizer = model_and_optimizer(1)
    generator = torch.Generator().manual_seed(5)

    def step(replica: Replica) -> None:
        replica.optimizer.zero_grad()
        torch.autograd.backward(loss_of(replica.model, generator))
        replica.step()

    with Replica(model, optimizer, server, "pulled", worker=0, **settings) as first:
        while first.index < 9:
            step(first)
        # Worker 0 publishes first, and after update 8, when it is its turn.
        with Replica(late, its_optimizer, server, "pulled", worker=1, **settings) as second:
            assert second.index == 8
            while not (first.finished and second.finished):
                for replica in (first, second):
                    if not replica.finished:
                        step(replica)
            with ThreadPoolExecutor(2) as both:
                list(both.map(Replica.finish, (first, second)))
    assert digest(model) == digest(late)
    # It is normal that others have not published yet.
    assert not [line for line in log.lines if "found no parameters" in line]


def test_weights_that_a_slower_replica_replaced_are_published_again(server: str) -> None:
    """The slow replica publishes in its turn, but after the fast one has published the last update and only waits."""
    settings: dict[str, Any] = {"workers": 2, "threshold": 1, "staleness": 1, "updates": 30, "deadline": 10}
    with (
        Replica(*model_and_optimizer(0), server, "replaced", worker=0, **settings) as fast,
        Replica(*model_and_optimizer(1), server, "replaced", worker=1, **settings) as slow,
        ThreadPoolExecutor(1) as other,
    ):
        while not fast.finished:
            step(fast)
        slow._publish(5)
        waiting = other.submit(fast.finish)
        slow.finish()
        waiting.result()
        assert slow.contributions.restarts == 1
        assert digest(fast.model) == digest(slow.model)


def step(replica: Replica) -> None:
    replica.optimizer.zero_grad()
    torch.autograd.backward(loss_of(replica.model, torch.Generator().manual_seed(replica.index)))
    replica.step()


def test_a_job_that_failed_goes_on_under_another_name(server: str) -> None:
    settings: dict[str, Any] = {"workers": 2, "threshold": 2, "publish_period": 1}
    with Replica(*model_and_optimizer(0), server, "failing", worker=0, deadline=1, **settings) as first:
        with Replica(*model_and_optimizer(1), server, "failing", worker=1, deadline=1, **settings) as second:
            while min(first.index, second.index) < 3:
                step(first)
                step(second)
        with pytest.raises(errors.MissingWorkerError, match="start a new job"):
            while True:
                step(first)
    with innet.connect(server) as client:
        left = client.get_parameters("failing.weights")
        while "failing" in client.stats()["gradients"]["jobs"]:
            pass
    assert left is not None
    assert left.tensors["index"] >= 2
    # Under the same name the job would begin anew, and its weights would be of updates to come.
    with Replica(*model_and_optimizer(2), server, "failing", worker=0, deadline=100, **settings) as again:
        with pytest.raises(errors.GradientError, match="a name of its own"):
            while True:
                step(again)
    model, optimizer = model_and_optimizer(3)
    settings |= {"resume": "failing", "deadline": 20}
    with Replica(model, optimizer, server, "going on", worker=0, **settings) as first:
        for name, parameter in model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), left.tensors[f"model.{name}"])
        assert int(optimizer.state_dict()["state"][0]["step"]) == left.tensors["index"]
        with Replica(*model_and_optimizer(4), server, "going on", worker=1, **settings) as second:
            while min(first.index, second.index) < 3:
                step(first)
                step(second)
    with pytest.raises(errors.ConfigError, match="no replica of job 'nobody'"):
        Replica(model, optimizer, server, "nothing", worker=0, workers=1, resume="nobody")


def test_a_frozen_server_keeps_nobody() -> None:
    with gradient_process() as (address, process):
        model, optimizer = model_and_optimizer(0)
        with Replica(model, optimizer, address, "frozen", worker=0, workers=1, updates=5, deadline=1.0) as replica:
            step(replica)
            process.send_signal(signal.SIGSTOP)
            # Until all of its threads have stopped, the server may still answer.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            with pytest.raises(errors.DeadlineError):
                replica.check()
            with pytest.raises((errors.SilentAggregatorError, errors.DeadlineError)):
                replica.finish()
        with pytest.raises(errors.ReplayError):
            Replica(model, optimizer, address, "frozen", worker=0, workers=1, deadline=1.0)


def test_a_replica_says_what_it_cannot_take(server: str) -> None:
    model, optimizer = model_and_optimizer(0)
    with pytest.raises(errors.ConfigError, match="float32"):
        Replica(model.double(), optimizer, server, "double", worker=0, workers=1)
    model, optimizer = model_and_optimizer(0)
    with pytest.raises(errors.ConfigError, match="threshold"):
        Replica(model, optimizer, server, "many", worker=0, workers=1, threshold=2)
    with Replica(model, optimizer, server, "alone", worker=0, workers=1) as replica:
        with pytest.raises(errors.ConfigError, match="backward"):
            replica.step()
        with pytest.raises(errors.ConfigError, match="no last update"):
            replica.finish()
