"""TransferQueue's simple storage and its client, on Ray: blocks as jagged tensors."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

# Read when it is imported. By default it warns in every call that these are more threads than cores.
os.environ["TQ_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from benchmarks.systems.queues import BATCH, Block, Trajectory, ray

VERSION = f"TransferQueue {importlib.metadata.version('TransferQueue')}, {ray.VERSION}"
RAGGED = ("tokens", "log_probabilities")
WHERE: dict[str, Any] = {"data_fields": ["numbers", *RAGGED], "partition_id": "rollouts", "task_name": "learn"}
# A request that waits for data would hold up the controller, which has one thread.
SETTINGS = {"controller": {"polling_mode": True}}


def store(size: int) -> tuple[str, Callable[[], None]]:
    address = ray.start()
    transfer_queue.init(OmegaConf.create(SETTINGS))
    return address, transfer_queue.close


def produce(address: str, source: Iterator[Block]) -> None:
    client = _client(address)
    for block in source:
        fields = {name: torch.from_numpy(column) for name, column in block.items()}
        offsets = fields.pop("offsets")
        fields |= {name: torch.nested.nested_tensor_from_jagged(fields[name], offsets) for name in RAGGED}
        client.put(TensorDict(fields, batch_size=[BATCH]), partition_id=WHERE["partition_id"])


def consume(address: str) -> Iterator[list[Trajectory]]:
    client = _client(address)
    while True:
        while not (found := client.get_meta(batch_size=BATCH, mode="fetch", **WHERE)).size:
            time.sleep(0.001)
        data = client.get_data(found)
        client.clear_samples(found)
        arrays = ([each.numpy() for each in data[name].unbind()] for name in RAGGED)
        yield list(zip(data["numbers"].flatten().tolist(), *arrays, strict=True))


def _client(address: str) -> Any:
    ray.join(address)
    transfer_queue.init()
    return transfer_queue.get_client()
