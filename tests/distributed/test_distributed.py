"""Gradients of `torch.distributed` programs through a real server: the communication hook and the backend."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import Future as Result
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import trustme
import vault
from gradient_workers import Raised, gradient_process, gradient_racks, gradient_server, returned, run_workers
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import innet_drl as innet
from innet_drl.distributed import State, hook
from innet_drl.distributed.backend import ADDRESS, RACK, TLS_CA, InnetBackend, SumWork
from innet_drl.distributed.hook import summed

pytestmark = pytest.mark.slow


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


def train(
    model: nn.Module, rank: int, updates: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Any]:
    """Trains on data of this rank; the weights."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(updates):
        data = torch.randn(16, 8, generator=generator).to(device, dtype)
        optimizer.zero_grad()
        (model(data) - data.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu().float().numpy().copy() for parameter in model.parameters()]


class Counting(State):
    """Counts its buckets."""

    buckets = 0

    def mean(self, values: Tensor) -> Tensor:
        self.buckets += 1
        return super().mean(values)


def train_with_ddp(rank: int, size: int, store: Path, server: str, job: str, dtype: str) -> list[Any]:
    begin(store, rank, size)
    kind = getattr(torch, dtype)
    # Small buckets: several for each backward pass, and others from the second pass on.
    model = DistributedDataParallel(network(kind), bucket_cap_mb=0.001)
    if job:
        with Counting.join(server, job, deadline=30) as state:
            model.register_comm_hook(state, hook)
            weights = train(model, rank, 5, kind)
            assert state.buckets >= 1 + 4 * 3, state.buckets
            return weights
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_are_widened(server: str, tmp_path: Path, dtype: str) -> None:
    ours = returned(run_workers(train_with_ddp, 2, tmp_path / "ours", server, f"ddp-{dtype}", dtype))
    gloo = returned(run_workers(train_with_ddp, 2, tmp_path / "gloo", server, "", dtype))
    for mine, other, theirs in zip(*ours, gloo[0], strict=True):
        assert np.array_equal(mine, other)
        np.testing.assert_allclose(mine, theirs, rtol=0.05, atol=0.05)


class Forks(nn.Module):
    """Two ways, of which a forward pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.ways = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, data: Tensor, way: int) -> Tensor:
        out: Tensor = self.ways[way](data)
        return out


def train_forks(rank: int, size: int, store: Path, server: str, job: str) -> list[Any]:
    """Each rank takes another way than the last time, and in the last pass all take the first one."""
    begin(store, rank, size)
    model = DistributedDataParallel(Forks(), find_unused_parameters=True)
    with contextlib.ExitStack() as stack:
        if job:
            model.register_comm_hook(stack.enter_context(State.join(server, job)), hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(100 + rank)
        for update in range(5):
            optimizer.zero_grad()
            way = 0 if update == 4 else (rank + update) % 2
            torch.autograd.backward(model(torch.randn(16, 8, generator=generator), way).square().mean())
            optimizer.step()
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def accumulate(rank: int, size: int, store: Path, server: str, job: str) -> list[Any]:
    """Two passes for each update, of which the second is summed."""
    begin(store, rank, size)
    model = DistributedDataParallel(network())
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(Counting.join(server, job)) if job else None
        if state is not None:
            model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                torch.autograd.backward(model(torch.randn(16, 8, generator=generator)).square().mean())
            torch.autograd.backward(model(torch.randn(16, 8, generator=generator)).square().mean())
            optimizer.step()
        assert state is None or state.buckets == 3
        return [parameter.detach().numpy().copy() for parameter in model.parameters()]


@pytest.mark.parametrize("training", [train_forks, accumulate])
def test_unused_parameters_and_accumulated_gradients_go_as_by_gloo(
    server: str, tmp_path: Path, training: Callable[..., list[Any]]
) -> None:
    ours = returned(run_workers(training, 2, tmp_path / "ours", server, training.__name__))
    gloo = returned(run_workers(training, 2, tmp_path / "gloo", server, ""))
    for mine, other, theirs in zip(*ours, gloo[0], strict=True):
        assert np.array_equal(mine, other)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_float64_is_refused(server: str, tmp_path: Path) -> None:
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


def die_between_two_sums(rank: int, size: int, store: Path, server: str) -> list[Any]:
    begin(store, rank, size)
    model = DistributedDataParallel(network())
    model.register_comm_hook(State.join(server, "dying between", deadline=20), hook)
    train(model, rank, 2)
    if rank == 1:
        os._exit(9)
    with innet.connect(server) as replay:
        while replay.stats()["gradients"]["jobs"]["dying between"]["joined"] == size:
            time.sleep(0.01)
    return train(model, rank, 1)


def test_backward_names_a_worker_that_died_before_it_at_once(server: str, tmp_path: Path) -> None:
    first, died, last = run_workers(die_between_two_sums, 3, tmp_path / "store", server)
    assert died is None
    for left in (first, last):
        assert isinstance(left, Raised)
        assert (left.kind, left.missing) == ("MissingWorkerError", (1,))
        assert "rank 1" in left.message
        assert "which left" in left.message
        assert "waited" not in left.message, "not at a deadline"


def test_backward_names_a_worker_that_died(server: str, tmp_path: Path) -> None:
    first, died, last = run_workers(die_in_the_middle, 3, tmp_path / "store", server)
    assert died is None
    for left in (first, last):
        assert isinstance(left, Raised)
        assert (left.kind, left.missing) == ("MissingWorkerError", (1,))
        assert "rank 1" in left.message


def test_an_exception_in_the_block_waits_for_nothing_and_closes_the_connection() -> None:
    with gradient_process() as (address, process):
        with pytest.raises(ZeroDivisionError):
            with State.join(address, "job", worker=0, workers=1, deadline=100) as state:
                process.send_signal(signal.SIGSTOP)
                raise ZeroDivisionError
        assert "closed" in repr(state._connection)


def train_in_racks(rank: int, size: int, servers: list[str]) -> list[float]:
    with State.join(servers[rank // 2], "racks", worker=rank % 2, workers=2, world=size) as state:
        return state.mean(torch.full((500,), float(rank))).tolist()[::499]


def reduce_in_racks(rank: int, size: int, store: Path, servers: list[str], authority: str) -> list[float]:
    # Racks of one rank and of two, in another order than the ranks: 1 | 0, 2.
    rack = int(rank != 1)
    os.environ.update({ADDRESS: servers[rack], RACK: f"rack {rack}", TLS_CA: authority})
    begin(store, rank, size, "cpu:innet")
    everyone = torch.full((500,), float(rank + 1))
    dist.all_reduce(everyone)
    pair = dist.new_group([0, 2])
    of_pair = torch.full((1,), float(rank + 1))
    if rank != 1:
        assert isinstance(pair, dist.ProcessGroup)
        dist.all_reduce(of_pair, group=pair)
    dist.barrier()
    dist.destroy_process_group()
    return [everyone[0].item(), everyone[-1].item(), of_pair.item()]


def test_a_state_joins_below_a_parent() -> None:
    with gradient_racks(2) as servers:
        assert returned(run_workers(train_in_racks, 4, servers)) == [[1.5, 1.5]] * 4


def test_the_backend_takes_racks_and_an_authority_of_its_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    tls = ("--tls-cert", str(tmp_path / "chain.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with gradient_racks(2, *tls, listen="innets://127.0.0.1:0") as servers:
        assert servers[0].startswith("innets://")
        store = tmp_path / "store"
        results = returned(run_workers(reduce_in_racks, 3, store, servers, str(tmp_path / "authority.pem")))
    assert results == [[6.0, 6.0, 4.0], [6.0, 6.0, 2.0], [6.0, 6.0, 4.0]]


def poll(rank: int, size: int, store: Path, server: str) -> dict[str, Any]:
    os.environ[ADDRESS] = server
    begin(store, rank, size, "cpu:innet")
    tensor = torch.full((1000,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    future = work.get_future()
    while not future.done():
        pass
    found = {"sum": tensor[-1].item(), "same": future.value()[0].data_ptr() == tensor.data_ptr()}
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, InnetBackend)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    if rank == 1:
        dist.all_reduce(torch.ones(3))
        os._exit(9)
    for expected in (True, False):
        # Torch's own wrapper of a work in Python says nothing of its end: the backend's work does.
        work = backend.allreduce([torch.ones(3)], options)
        while not work.is_completed():
            pass
        assert work.is_success() is expected
        if expected:
            assert work.exception() is None
            found["result"] = work.result()[0].tolist()
    found["failure"] = type(work.exception()).__name__
    for end in (work.wait, work.result):
        with pytest.raises(innet.errors.MissingWorkerError):
            end()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    future = work.get_future()
    while not future.done():
        pass
    with pytest.raises(RuntimeError, match="GradientError"):
        future.wait()
    with pytest.raises(innet.errors.GradientError):
        work.wait()
    return found


def test_a_sum_may_be_polled(server: str, tmp_path: Path) -> None:
    polled, died = run_workers(poll, 2, tmp_path / "store", server)
    assert died is None
    (found,) = returned([polled])
    assert found == {"sum": 3.0, "same": True, "result": [2.0, 2.0, 2.0], "failure": "MissingWorkerError"}


def test_a_sum_that_never_began_says_so() -> None:
    result: Result[None] = Result()
    work = SumWork(result, [])
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    result.cancel()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), CancelledError)


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


def sum_alone(server: str, device: str) -> None:
    with State.join(server, f"alone-{device}", worker=0, workers=1) as state:
        values = torch.arange(2000.0).to(device)
        assert torch.equal(state.mean(values.clone()).cpu(), values.cpu())
        half = values.to(torch.float16)
        assert torch.equal(summed(state.worker, half.clone(), mean=False).cpu(), half.cpu())
        weights = nn.Parameter(half.clone())
        assert torch.equal(state.mean(weights).cpu(), half.cpu())


def test_one_worker_alone_sums(server: str) -> None:
    sum_alone(server, "cpu")


def train_on(rank: int, size: int, store: Path, server: str, device: str, library: Path | None) -> list[Any]:
    backend = "gloo"
    if library is not None:
        vault.load(library)
        backend = "cpu:gloo,vault:vault"
    if rank == 0:
        sum_alone(server, device)
    begin(store, rank, size, backend)
    model = DistributedDataParallel(network().to(device), bucket_cap_mb=0.001)
    with Counting.join(server, f"on-{device}", deadline=30) as state:
        model.register_comm_hook(state, hook)
        weights = train(model, rank, 5, device=device)
        assert state.buckets >= 1 + 4 * 3, state.buckets
        return weights


def weights_on(device: str, library: Path | None, server: str, folder: Path) -> list[Any]:
    """The weights after a training on two such devices."""
    mine, other = returned(run_workers(train_on, 2, folder / device, server, device, library))
    for one, two in zip(mine, other, strict=True):
        assert np.array_equal(one, two)
    return list(mine)


def read_by_address(rank: int, size: int, library: Path) -> bytes:
    vault.load(library)
    kept = torch.ones(5).to("vault")
    assert torch.equal(kept.cpu(), torch.ones(5))
    return ctypes.string_at(kept.data_ptr(), 4)


@pytest.mark.skipif(vault.COMPILER is None, reason="the device `vault` wants g++")
@pytest.mark.timeout(600)  # Mostly the compiler's.
def test_the_hook_takes_tensors_that_the_processor_cannot_read(server: str, tmp_path: Path) -> None:
    library = vault.build(tmp_path)
    assert run_workers(read_by_address, 1, library) == [None], "the processor reads the device's memory"
    there = weights_on("vault", library, server, tmp_path)
    here = weights_on("cpu", None, server, tmp_path)
    for mine, theirs in zip(there, here, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA tensors want a GPU")
def test_the_hook_takes_cuda_tensors(server: str, tmp_path: Path) -> None:
    there = weights_on("cuda", None, server, tmp_path)
    here = weights_on("cpu", None, server, tmp_path)
    for mine, theirs in zip(there, here, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
