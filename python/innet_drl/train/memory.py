"""The replay memory of a run: one interface for actors and learners, independent of its location.

The first learner creates the memory, and every other process of the run joins it:

| `--replay` | class | items are kept in |
| --- | --- | --- |
| `embedded` | `EmbeddedMemory` | the first learner's process, which serves them |
| an address of `innet-replay serve` | `ServerMemory` | the server |
| an address with another scheme | the entry point of that name in the group `innet_drl.memories` | up to that class |
"""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.errors import naming_extras
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError, ReplayMemoryError
from innet_drl.train.observe.metrics import ActorReport
from innet_drl.train.published_run import ReportWriter, RunPublisher, reports_table
from innet_drl.train.settings.config import SERVER_SCHEMES
from innet_drl.train.settings.slices import LearnerSettings, ReplaySettings

if TYPE_CHECKING:
    # Whether a server answers is checked before torch is imported.
    from innet_drl.torch_batches import TorchBatch

logger = logging.getLogger(__name__)

ENTRY_POINTS = "innet_drl.memories"
"""Group of entry points: subclasses of `ReplayMemory`, named by the scheme of their addresses."""

GRACE_SECONDS = 0.25
"""Seconds by which a call may exceed its timeout: short, so that the page names a silent server soon."""

IMAGE_BYTES = 2_000
"""Memory reserved for each step with an image of at least as many bytes. Compressed without differences, Breakout takes
409 on average and Seaquest 741."""
IMAGE_OVERHEAD_BYTES = 128
"""Upper bound on the bytes of a step besides its image."""

OTHER_NAME = "choose a namespace of its own, or another folder, whose last part names the memory"
"""Advice where another run has the name."""

TABLE_SETTINGS = (
    "environment",
    "capacity",
    "min_size",
    "samples_per_insert",
    "max_version_lag",
    "priority_exponent",
    "actors",
    "environments",
    "chunk_steps",
    "prefetch",
    "batch_size",
    "learners",
)
"""Settings that affect the definition of a run's table, including the slack of its replay ratio."""


@dataclass(frozen=True)
class MemorySettings:
    """What a run's memory depends on."""

    config: ReplaySettings
    address: str
    """`embedded`, or the address at which the memory is created, served or joined."""
    table: innet.Table
    """Rows as actors write them."""
    view: innet.NStep
    """Transitions as the learner reads them."""
    spec: EnvironmentSpec
    parameters: Mapping[str, NDArray[Any]]
    """Example of the published tensors: names, dtypes and shapes."""
    resumed: bool
    """Whether the run continues from a checkpoint, so that a memory of its name may exist."""
    changed: tuple[str, ...]
    """Members of `TABLE_SETTINGS` that have changed since the previous session, for messages."""
    token: str = field(repr=False)
    """Token or password of the memory; empty for none."""

    @property
    def demonstrations(self) -> str:
        """Name of the demonstrations' table."""
        return f"{self.table.name}-demonstrations"


class RowWriter(Protocol):
    """Takes the rows of one actor: `innet_drl.Writer`, or a replacement."""

    def append(self, *, terminated: Any, truncated: Any, first: Any, timeout: float | None, **columns: Any) -> None:
        """Takes one row of every environment within `timeout` seconds."""

    def flush(self, timeout: float | None) -> None:
        """Waits up to `timeout` seconds until all sent rows have arrived."""

    def close(self, timeout: float | None = None) -> None:
        """Sends the remaining rows within `timeout` seconds."""


class PublishedParameters(Protocol):
    """One version of the parameters: `innet_drl.Parameters`, or a replacement."""

    @property
    def version(self) -> int:
        """Version number, which rises with every publication."""

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Arrays by name."""


class ReplayMemory(abc.ABC):
    """The memory that actors write to and learners sample from, with the published parameters.

    Args:
        replay: The replay; `None` in an actor without access to it.
        settings: The memory's settings.
        address: Address by which the run's other processes join.
        view: View with which batches are sampled.
    """

    in_learner: ClassVar[bool]
    """Whether the items are in the first learner's process, which saves them with each checkpoint."""

    def __init__(
        self,
        replay: innet.Replay | None,
        settings: MemorySettings,
        address: str,
        view: innet.NStep | innet.Window | None = None,
    ) -> None:
        self.address = address
        self._replay = replay
        self._settings = settings
        self._name = settings.table.name
        self._sampled: str | innet.Mix = self._name
        if settings.config.preload is not None:
            share = settings.config.preload_share
            self._sampled = innet.Mix({self._name: 1 - share, settings.demonstrations: share})
        self._view = view or settings.view
        self._report_writer: ReportWriter | None = None
        self.incarnation: str | None = None
        """Id of the server's memory at the last `stats`, which changes with a restart of the server."""
        self.restored_steps = 0
        """Steps of the table that the server restored from its snapshot at its last start."""

    @classmethod
    @abc.abstractmethod
    def check(cls, config: ReplaySettings, token: str) -> None:
        """Connects to the run's address, to report a wrong one before anything is created.

        Raises:
            ConfigurationError: The memory does not support a setting.
            innet_drl.ReplayError: Nothing answers there.
        """

    @classmethod
    @abc.abstractmethod
    def create(cls, settings: MemorySettings) -> AbstractContextManager[Self]:
        """Opens the memory in the first learner, with the table of the run.

        Raises:
            ConfigurationError: There is no space for the table, or another run's memory has this name.
        """

    @classmethod
    @abc.abstractmethod
    def join(cls, settings: MemorySettings) -> AbstractContextManager[Self]:
        """Opens the memory in another process of the run."""

    @abc.abstractmethod
    def writer(self, actor: int) -> RowWriter:
        """Opens the writer of one actor's environments."""

    @abc.abstractmethod
    def get_parameters(self, newer_than: int = 0) -> PublishedParameters | None:
        """Returns the newest parameters, or `None` if their version is not above `newer_than`."""

    @abc.abstractmethod
    def put_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Publishes parameters."""

    def write_report(self, report: ActorReport, timeout: float) -> None:
        """Sends the learner an actor's report. A memory whose actors have no replay has another way.

        Raises:
            DeadlineError: The server is away: the report is sent with the next one.
        """
        if self._report_writer is None:
            self._report_writer = ReportWriter(self.replay, self._name, report.actor)
        self._report_writer.write(report, timeout)

    def published_run(self) -> AbstractContextManager[RunPublisher]:
        """The learner's side of the reports, and of the settings for actors that join."""
        return contextlib.nullcontext(RunPublisher(self.replay, self._name, self._settings.config))

    @property
    def replay(self) -> innet.Replay:
        """The replay that has the table."""
        if self._replay is None:
            raise ReplayMemoryError(
                f"actors of {type(self).__name__} have no replay: it has to define write_report and published_run"
            )
        return self._replay

    def batches(
        self, device: str, timeout: float, writers_timeout: float | None = None
    ) -> AbstractContextManager[Iterator[TorchBatch]]:
        """Samples batches until closed; each waits up to `timeout` seconds, then raises a `DeadlineError`.

        After `writers_timeout` seconds without a batch and without a connected writer it is a `NoWritersError`.
        """
        config = self._settings.config
        return self.replay.batches(
            self._sampled,
            config.batch_size,
            self._view,
            beta=config.importance_exponent,
            normalize=config.normalize_weights,
            # A serial run is repeatable only if it samples on demand.
            prefetch=0 if config.serial else config.prefetch,
            device=device,
            timeout=timeout,
            writers_timeout=writers_timeout,
        )

    def update_priorities(self, keys: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        """Sets the priorities of sampled transitions, without waiting for a server's answer."""
        patience = self._settings.config.replay_patience
        self.replay.update_priorities(self._sampled, keys, priorities, timeout=patience, wait=False)

    def stats(self, timeout: float | None = None) -> dict[str, Any]:
        """Returns the table's counters; `timeout` defaults to the patience of the settings."""
        stats = self.replay.stats(self._settings.config.replay_patience if timeout is None else timeout)
        self.incarnation = stats["incarnation"]
        restored = stats.get("snapshots", {}).get("restored") or {"tables": {}}
        self.restored_steps = restored["tables"].get(self._name, 0)
        table: dict[str, Any] = stats["tables"][self._name]
        return table

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the items to a file, if this process keeps them."""
        assert isinstance(self.replay, innet.Memory), "saved by the process that keeps the items"
        self.replay.save(path)

    def restore(self, path: str | PathLike[str]) -> None:
        """Reads the items of a file that `save` wrote into the empty memory."""
        assert isinstance(self.replay, innet.Memory), "restored by the process that keeps the items"
        self.replay.restore(path)


class ServerMemory(ReplayMemory):
    """The memory as a client of a server, which is `innet-replay serve` or the first learner."""

    in_learner = False
    _writer: innet.Writer | None = None

    @classmethod
    def check(cls, config: ReplaySettings, token: str) -> None:
        """Connects to the server."""
        innet.connect(config.replay, token=token, tls_ca=config.replay_ca).close()

    @classmethod
    @contextlib.contextmanager
    def create(cls, settings: MemorySettings) -> Iterator[Self]:
        """Creates the run's table at the server, where it outlives the run."""
        address, name = settings.address, settings.table.name
        with _connect(settings) as replay:
            if not settings.resumed and replay.stats()["tables"][name]["inserted_items"]:
                raise ConfigurationError(
                    f"{address} holds the memory of another run named {name!r}: continue that run (resume), or "
                    f"{OTHER_NAME}"
                )
            within = f" in the namespace {settings.config.namespace}" if settings.config.namespace else ""
            logger.info("the replay memory is table %r at %s%s; it stays there afterwards", name, address, within)
            yield cls(replay, settings, address)

    def published_run(self) -> AbstractContextManager[RunPublisher]:
        """Connects for the reports separately, as the calls of the memory may block for long."""
        settings = self._settings
        return RunPublisher.connect(self._name, settings.config, settings.token, resumed=settings.resumed)

    @classmethod
    @contextlib.contextmanager
    def join(cls, settings: MemorySettings) -> Iterator[Self]:
        """Connects to the server."""
        with _connect(settings) as replay:
            yield cls(replay, settings, settings.address)

    def writer(self, actor: int) -> innet.Writer:
        """Opens the writer of one actor's environments."""
        config = self._settings.config
        self._writer = self.replay.writer(
            self._name,
            config.environments,
            self._settings.view,
            name=f"actor {actor}",
            server=actor,
            chunk_steps=config.chunk_steps,
        )
        return self._writer

    def get_parameters(self, newer_than: int = 0) -> innet.Parameters | None:
        """Returns the newest parameters, or `None` if their version is not above `newer_than`."""
        return self.replay.get_parameters(self._name, newer_than=newer_than, timeout=None, writer=self._writer)

    def put_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Publishes parameters."""
        self.replay.put_parameters(self._name, tensors, timeout=self._settings.config.replay_patience)


class EmbeddedMemory(ServerMemory):
    """The memory in the first learner's process, with the run's other processes as clients."""

    in_learner = True
    published_run = ReplayMemory.published_run

    @classmethod
    @contextlib.contextmanager
    def create(cls, settings: MemorySettings) -> Iterator[Self]:
        """Makes the memory and serves it to the run's other processes: on a Unix socket, or at another address."""
        with (
            # Not in the run's folder, as paths of Unix sockets are limited to 107 bytes.
            tempfile.TemporaryDirectory(prefix="innet-") as directory,
            make_replay(settings, settings.table, reports_table(settings.table.name)) as replay,
        ):
            here = settings.address == "embedded"
            address = f"unix://{directory}/replay" if here else settings.address
            # Processes authenticate with the token; the launcher's network is trusted with unencrypted data.
            with replay.serve(address, token=settings.token or None, trusted_network=not here) as server:
                yield cls(replay, settings, server.addresses[0])

    @classmethod
    @contextlib.contextmanager
    def unserved(cls, settings: MemorySettings) -> Iterator[Self]:
        """Makes the memory of a run in one process."""
        with make_replay(settings, settings.table) as replay:
            yield cls(replay, settings, settings.address)


def memory_class(address: str) -> type[ReplayMemory]:
    """Returns the class for an address of `--replay`; imports it if it is in another package."""
    if address == "embedded":
        return EmbeddedMemory
    scheme = address.partition("://")[0]
    if scheme in SERVER_SCHEMES:
        return ServerMemory
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=scheme):
        with naming_extras():
            found: type[ReplayMemory] = entry_point.load()
        return found
    return ServerMemory


def memory_settings(
    config: ReplaySettings,
    spec: EnvironmentSpec,
    name: str,
    parameters: Mapping[str, NDArray[Any]],
    *,
    address: str | None = None,
    token: str | None = None,
    earlier: ReplaySettings | None = None,
) -> MemorySettings:
    """Collects the settings of a run's memory, to create it at the configured address or to join it at another one.

    A `token` of `None` is read from the environment. `earlier` has the settings of the previous session.
    """
    return MemorySettings(
        config=config,
        address=config.replay if address is None else address,
        table=make_table(config, spec, name),
        view=make_view(config, spec),
        spec=spec,
        parameters=parameters,
        resumed=earlier is not None,
        changed=() if earlier is None else config.changed(earlier, TABLE_SETTINGS),
        token=memory_token(config) if token is None else token,
    )


def memory_token(config: ReplaySettings) -> str:
    """The token of the run's memory, from the environment; an embedded memory has none."""
    return "" if config.replay == "embedded" else os.environ.get("INNET_TOKEN", "").strip()


def actor_token(config: ReplaySettings) -> str:
    """The token of the run's actors, from the environment: INNET_ACTOR_TOKEN, or INNET_TOKEN."""
    return "" if config.replay == "embedded" else server_token_of_actors()


def aggregator_token(config: LearnerSettings) -> str:
    """The token of the aggregator of gradients, from the environment; an embedded one has none."""
    return "" if config.gradients == "embedded" else os.environ.get("INNET_TOKEN", "").strip()


def server_token_of_actors() -> str:
    """The token of actors at a server, from the environment."""
    return (os.environ.get("INNET_ACTOR_TOKEN", "") or os.environ.get("INNET_TOKEN", "")).strip()


def make_table(config: ReplaySettings, spec: EnvironmentSpec, name: str) -> innet.Table:
    """The table of a run: one frame or one vector a step, of each part of a dictionary; the view stacks frames."""
    columns = {
        "frame" if part.name == "" else f"frame/{index}": (part.dtype, part.shape)
        for index, part in enumerate(spec.arrays)
    } | {"action": spec.action_dtype, "reward": "float32"}
    return innet.Table(
        name,
        columns,
        config.capacity,
        capacity_bytes=_capacity_bytes(config, spec),
        sampler="prioritized",
        priority_exponent=config.priority_exponent,
        # A serial run controls the replay ratio itself, as its only thread must not block in the memory.
        min_size=1 if config.serial else config.min_size,
        samples_per_insert=0.0 if config.serial else config.samples_per_insert,
        slack=0.0 if config.serial else config.slack,
        max_version_lag=0 if config.serial else config.max_version_lag,
    )


def make_view(config: ReplaySettings, spec: EnvironmentSpec) -> innet.NStep:
    """The n-step transitions that the learner reads."""
    return innet.NStep(stack=spec.stack, n=config.n_step, gamma=config.gamma, observation="frame")


def make_replay(settings: MemorySettings, *tables: innet.Table) -> innet.Memory:
    """Makes a memory in this process."""
    try:
        return innet.Memory(tables, max_bytes=settings.config.max_bytes, seed=settings.config.seed)
    except innet.errors.TableError as error:
        raise ConfigurationError(
            f"not enough memory for the table ({error}): lower capacity, or raise max_bytes"
        ) from error


def _capacity_bytes(config: ReplaySettings, spec: EnvironmentSpec) -> int:
    """Capacity in bytes of a table of images, which a server reserves; 0, the raw size, for vectors."""
    if not any(part.is_image for part in spec.arrays):
        return 0
    # Room for more than `min_size` uncompressed frames, so that learning can start.
    raw = IMAGE_OVERHEAD_BYTES + sum(part.nbytes for part in spec.arrays)
    return max(config.capacity * min(IMAGE_BYTES, raw), min(2 * config.min_size, config.capacity) * raw)


def _connect(settings: MemorySettings) -> innet.Replay:
    config, address, table = settings.config, settings.address, settings.table
    try:
        # Every process passes the table, so that the first one to reach a restarted, empty server recreates it.
        return innet.connect(
            address,
            token=settings.token,
            tables=[table],
            tls_ca=config.replay_ca,
            grace=GRACE_SECONDS,
            reconnect_for=config.replay_patience,
            namespace=config.namespace or None,
        )
    except innet.errors.TableDiffersError as error:
        within = f", namespace={config.namespace!r}" if config.namespace else ""
        drop = f"innet_drl.connect({address!r}{within}).drop_table({table.name!r})"
        advice = f"{OTHER_NAME}, or drop that one"
        if settings.resumed:
            changed = " and ".join(settings.changed or TABLE_SETTINGS)
            kept = f"keep {changed} as in the run's config.yaml" if settings.changed else f"take those back ({changed})"
            advice = f"{kept}, or drop the memory, which is filled anew"
        raise ConfigurationError(
            f"{address} holds a memory named {table.name!r} that was made with other settings ({error}): {advice}: "
            f"{drop}"
        ) from error
    except innet.errors.TableError as error:
        raise ConfigurationError(
            f"{address} has not enough memory for the table ({error}): lower capacity, drop a table there that no run "
            "needs any more (Replay.drop_table), or give the server more memory (innet-replay serve --max-bytes)"
        ) from error
