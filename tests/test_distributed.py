"""Gradients of `torch.distributed` programs through a real server: the communication hook and the backend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import innet_drl as innet
from gradient_workers import Raised, gradient_server, returned, run_workers
from innet_drl.distributed import State, hook
from innet_drl.distributed.backend import ADDRESS, InnetBackend
from innet_drl.distributed.hook import summed


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with gradient_server() as address:
        yield address


def begin(store: Path, rank: int, size: int, backend: str = "gloo") -> None:
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 200), nn.Tanh(), nn.Linear(200, 1)).to(dtype)


def train(model: nn.Module, rank: int, updates: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Trains on data of this rank; the weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(updates):
        data = torch.randn(16, 8, generator=generator).to(dtype)
        optimizer.zero_grad()
        (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().float().numpy().copy() for parameter in model.parameters()]


def train_with_ddp(rank: int, size: int, store: Path, server: str, job: str, dtype: str) -> list[Any]:
    begin(store, rank, size)
    kind = getattr(torch, dtype)
    # Small buckets: several for each backward pass, and others from the second pass on.
    model = DistributedDataParallel(network(kind), bucket_cap_mb=1)
    if job:
        with State.join(server, job, deadline=30) as state:
            model.register_comm_hook(state, hook)
            return train(model, rank, 5, kind)
    return train(model, rank, 5, kind)


def test_the_hook_trains_as_gloos_all_reduce_does(server: str, tmp_path: Path) -> None:
    ours = returned(run_workers(train_with_ddp, 3, tmp_path / "ours", server, "ddp", "float32"))
    gloo = returned(run_workers(train_with_ddp, 3, tmp_path / "gloo", server, "", "float32"))
    for weights in zip(*ours, strict=True):
        assert all(np.array_equal(weights[0], other) for other in weights), "replicas differ"
    for mine, theirs in zip(ours[0], gloo[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    with innet.connect(server) as client:
        assert client.stats()["gradients"]["counted"] > 0


def test_bfloat16_is_widened_and_float64_is_refused(server: str, tmp_path: Path) -> None:
    ours = returned(run_workers(train_with_ddp, 2, tmp_path / "ours", server, "ddp-16", "bfloat16"))
    gloo = returned(run_workers(train_with_ddp, 2, tmp_path / "gloo", server, "", "bfloat16"))
    for mine, other, theirs in zip(*ours, gloo[0], strict=True):
        assert np.array_equal(mine, other)
        np.testing.assert_allclose(mine, theirs, rtol=0.05, atol=0.05)
    refused = run_workers(train_with_ddp, 2, tmp_path / "64", server, "ddp-64", "float64")
    for result in refused:
        assert isinstance(result, Raised)
        assert result.kind == "TypeError"
        assert "float64" in result.message


def die_in_the_middle(rank: int, size: int, store: Path, server: str) -> list[Any]:
    begin(store, rank, size)
    model = DistributedDataParallel(network())
    state = State.join(server, "dying", deadline=20)
    model.register_comm_hook(state, hook)
    train(model, rank, 2)
    if rank == 1:
        os._exit(9)
    return train(model, rank, 1)


def test_backward_names_a_worker_that_died(server: str, tmp_path: Path) -> None:
    first, died, last = run_workers(die_in_the_middle, 3, tmp_path / "store", server)
    assert died is None
    for left in (first, last):
        assert isinstance(left, Raised)
        assert (left.kind, left.missing) == ("MissingWorkerError", (1,))
        assert "rank 1" in left.message


def collectives(rank: int, size: int, store: Path, server: str) -> dict[str, Any]:
    os.environ[ADDRESS] = server
    begin(store, rank, size, "cpu:innet")
    assert dist.get_backend() == "innet" or "innet" in str(dist.get_backend_config())
    found: dict[str, Any] = {}

    def reduced(tensor: Tensor, operation: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
        dist.all_reduce(tensor, operation, **options)
        return tensor.tolist()

    found["sum"] = reduced(torch.full((5,), float(rank + 1)))
    found["mean"] = reduced(torch.full((2, 2), float(rank)), dist.ReduceOp.AVG)
    found["gaps"] = reduced(torch.arange(6.0).view(2, 3).t() * (rank + 1))
    found["long"] = reduced(torch.tensor([rank, 10 * rank]))
    found["double"] = reduced(torch.tensor([rank], dtype=torch.float64))
    found["max"] = reduced(torch.tensor([float(rank)]), dist.ReduceOp.MAX)
    several = [torch.full((1000,), float(rank + number)) for number in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in several]
    for work in works:
        assert work is not None
        work.wait()
    found["async"] = [tensor[0].item() for tensor in several]
    told = torch.tensor([7.0 + rank])
    dist.broadcast(told, 1)
    found["broadcast"] = told.item()
    gathered = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([float(rank)]))
    found["gathered"] = [tensor.item() for tensor in gathered]
    into = torch.zeros(size)
    dist.all_gather_into_tensor(into, torch.tensor([float(rank)]))
    found["into"] = into.tolist()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = [one["rank"] for one in objects]
    if rank == 0:
        dist.send(torch.tensor([3.0]), 1)
    elif rank == 1:
        received = torch.zeros(1)
        dist.recv(received, 0)
        found["received"] = received.item()
    pair = dist.new_group([0, 1])
    if rank < 2:
        assert isinstance(pair, dist.ProcessGroup)
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value, group=pair)
        found["pair"] = value.item()
    dist.barrier()
    model = DistributedDataParallel(network())
    found["weights"] = train(model, rank, 2)
    dist.destroy_process_group()
    return found


def test_the_backend_sums_and_hands_the_rest_to_gloo(server: str, tmp_path: Path) -> None:
    with innet.connect(server) as client:
        before = client.stats()["gradients"]["counted"]
    results = returned(run_workers(collectives, 3, tmp_path / "store", server))
    for found in results:
        assert found["sum"] == [6.0] * 5
        assert found["mean"] == [[1.0, 1.0], [1.0, 1.0]]
        assert found["gaps"] == [[0.0, 18.0], [6.0, 24.0], [12.0, 30.0]]
        assert (found["long"], found["double"], found["max"]) == ([3, 30], [3.0], [2.0])
        assert found["async"] == [3.0, 6.0, 9.0, 12.0]
        assert found["broadcast"] == 8.0
        assert found["gathered"] == found["into"] == [0.0, 1.0, 2.0]
        assert found["objects"] == [0, 1, 2]
        for mine, first in zip(found["weights"], results[0]["weights"], strict=True):
            assert np.array_equal(mine, first)
    assert results[1]["received"] == 3.0
    assert [found.get("pair") for found in results] == [3.0, 3.0, None]
    with innet.connect(server) as client:
        assert client.stats()["gradients"]["counted"] > before


def die_in_a_group(rank: int, size: int, store: Path, server: str) -> None:
    os.environ[ADDRESS] = server
    begin(store, rank, size, "cpu:innet")
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os._exit(9)
    dist.all_reduce(torch.ones(3))


def test_an_all_reduce_names_a_rank_that_died(server: str, tmp_path: Path) -> None:
    left, died = run_workers(die_in_a_group, 2, tmp_path / "store", server)
    assert died is None
    assert isinstance(left, Raised)
    assert (left.kind, left.missing) == ("MissingWorkerError", (1,))


def test_the_backend_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    with pytest.raises(innet.errors.ConfigError, match="innet-replay serve --gradients"):
        InnetBackend(HashStore(), 0, 1, timedelta(seconds=5))


def test_one_worker_alone_sums_on_any_device(server: str) -> None:
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    with State.join(server, "alone", worker=0, workers=1) as state:
        for device in devices:
            values = torch.arange(2000.0, device=device)
            assert torch.equal(state.mean(values.clone()), values)
            half = values.to(torch.float16)
            assert torch.equal(summed(state.worker, half.clone(), mean=False), half)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA tensors want a GPU")
def test_the_hook_takes_cuda_tensors(server: str, tmp_path: Path) -> None:
    results = returned(run_workers(train_on_cuda, 2, tmp_path / "store", server))
    for mine, other in zip(*results, strict=True):
        assert np.array_equal(mine, other)
    on_cpu = run_workers(train_with_ddp, 2, tmp_path / "cpu", server, "", "float32")
    for mine, theirs in zip(results[0], on_cpu[0], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


def train_on_cuda(rank: int, size: int, store: Path, server: str) -> list[Any]:
    begin(store, rank, size)
    model = DistributedDataParallel(network().cuda(), bucket_cap_mb=1)
    with State.join(server, "cuda", deadline=30) as state:
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(5):
            data = torch.randn(16, 8, generator=generator).cuda()
            optimizer.zero_grad()
            (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return [parameter.detach().cpu().numpy() for parameter in model.parameters()]
