"""Processes of a run on a Ray cluster: `innet-drl train --launcher ray`.

Ray reserves resources and places processes; each is a child of a Ray actor on its node. Learner and replay server are
in this process, and their bundles are reserved on its node. Ray transports the messages of pipes: failures and
results of evaluations. Actors send steps and reports to the replay server directly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import innet_drl as innet
from innet_drl.launch.launcher import Ended, Launcher, LocalLauncher, ProcessFailure, environment_variable
from innet_drl.train.errors import ConfigurationError, ProcessError
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores

logger = logging.getLogger(__name__)

HERE = ("learner", "replay server")
"""Bundles of this process."""
POLL_SECONDS = 0.1
"""Period at which a Ray actor polls its process for messages."""
CONNECT_SECONDS = 10.0
WAIT_SECONDS = 2.0
"""Period at which the driver checks a pending reservation."""
UNPLACED_SECONDS = 10.0
"""Seconds after which the log names a process without a node."""

Bundles = dict[str, dict[str, float]]


def bundles(config: Config, *, gpus: int) -> Bundles:
    """Returns the resources of each process of a run, by its name."""
    learner: dict[str, float] = {"CPU": config.learners * (config.learner_threads or 1)}
    if config.device == "cuda" or (config.device == "auto" and gpus):
        learner["GPU"] = min(config.learners, gpus or config.learners)
    found: Bundles = {"learner": learner}
    if config.replay == "embedded":
        found["replay server"] = {"CPU": 1}
    if config.evaluation_period:
        found["evaluator"] = {"CPU": 1}
    actor = {"CPU": max(config.actor_threads, config.environment_threads)}
    return found | {f"actor {index}": dict(actor) for index in range(config.actors)}


def check(config: Config) -> None:
    """Refuses settings that do not fit a cluster."""
    if config.replay.startswith("unix://"):
        advice = "omit it, or name a server by innet://host:port"
        raise _unusable(f"actors on other nodes cannot reach replay {config.replay}: {advice}")
    address = os.environ.get("RAY_ADDRESS", "")
    if address.startswith("ray://"):
        raise _unusable(
            f"RAY_ADDRESS is {address}, but the learner has to be on a node of the cluster: start the command on the "
            "node that trains, with RAY_ADDRESS=auto, or by `ray job submit`"
        )
    host, _, port = address.rpartition(":")
    if port.isdigit() and not ray.is_initialized():
        # Checked here, because Ray retries for minutes and ignores Ctrl-C.
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise _unusable(
                f"nothing answers at RAY_ADDRESS={address} ({error}): start a cluster there (ray start --head), or "
                "omit RAY_ADDRESS for a local one"
            ) from error


@contextlib.contextmanager
def cluster(config: Config, name: str, say: Callable[[str], None]) -> Iterator[Callable[[], Launcher]]:
    """Reserves the resources of a run on the cluster of RAY_ADDRESS, or on a local one.

    Yields a factory of launchers. The log names the resources that the run waits for; Ctrl-C ends the wait.
    """
    say("connecting to Ray")
    full = f"innet-drl/{name}"
    with _connected(config), contextlib.ExitStack() as stack:
        node = ray.get_runtime_context().get_node_id()
        here = next(each for each in ray.nodes() if each["NodeID"] == node)
        wanted = bundles(config, gpus=int(here["Resources"].get("GPU", 0)))
        if any(group["name"] == full and group["state"] != "REMOVED" for group in placement_group_table().values()):
            advice = "choose another folder, whose last part is the name"
            raise _unusable(f"another run named {name!r} is on the cluster: {advice}")
        check_node(wanted, here)
        # The run's folder and the terminal of the learner are on this node.
        labels = [{"ray.io/node-id": node} if each in HERE else {} for each in wanted]
        group = placement_group(list(wanted.values()), name=full, bundle_label_selector=labels)
        stack.callback(remove_placement_group, group)
        said = None
        while not group.wait(WAIT_SECONDS):
            waiting = f"waiting for the Ray cluster: {_lacking(wanted, here)}"
            if waiting != said:
                logger.warning("%s; add nodes (ray start), or end with Ctrl-C and lower actors (ray status)", waiting)
                say(waiting)
                said = waiting
        placed = _Placed(group, wanted, full, here["NodeManagerAddress"])
        if "GPU" in wanted["learner"]:
            stack.enter_context(_reserved_gpus(placed))
        yield lambda: RayLauncher(placed)


@contextlib.contextmanager
def _connected(config: Config) -> Iterator[None]:
    """Connects to a cluster, or starts a local one for this process; keeps an existing connection of the program."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"logging_level": logging.WARNING, "namespace": "innet-drl"}
    if address == "local":
        # Allows as many processes as `--launcher local`.
        cpus = sum(bundle["CPU"] for bundle in bundles(config, gpus=0).values())
        options |= {"num_cpus": max(cores(), int(cpus)), "include_dashboard": False}
        logger.info("starting a local Ray cluster; RAY_ADDRESS names another one")
    try:
        ray.init(address, **options)
    except (RuntimeError, ValueError, OSError) as error:
        raise _unusable(f"the cluster of RAY_ADDRESS={address} cannot be used: {_summary(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_node(wanted: Bundles, here: dict[str, Any]) -> None:
    """Refuses a learner that exceeds this node's resources: more nodes would not help."""
    for resource, advice in (
        ("GPU", "take device cpu"),
        ("CPU", "lower learner_threads or learners, name a server (replay)"),
    ):
        needs = {name: wanted[name][resource] for name in HERE if resource in wanted.get(name, {})}
        present = here["Resources"].get(resource, 0)
        if sum(needs.values()) > present:
            few = f"{present:g} {resource}, too few for {', '.join(needs)} ({sum(needs.values()):g})"
            start = "or start the command on another node"
            raise _unusable(f"this node ({here['NodeManagerAddress']}) has {few}: {advice}, {start}")


def _lacking(wanted: Bundles, here: dict[str, Any]) -> str:
    free, total = ray.available_resources(), ray.cluster_resources()
    found = []
    for resource in ("GPU", "CPU"):
        needs = {name: bundle[resource] for name, bundle in wanted.items() if resource in bundle}
        if needs:
            found.append(
                f"{free.get(resource, 0):g} of {total.get(resource, 0):g} {resource} are free, and the run needs "
                f"{sum(needs.values()):g}, of which {sum(needs.get(name, 0) for name in HERE):g} on this node"
            )
    return f"{', '.join(found)} ({here['NodeManagerAddress']})"


@contextlib.contextmanager
def _reserved_gpus(placed: _Placed) -> Iterator[None]:
    """Limits this process to the GPUs that Ray has reserved for the learner, before torch initializes CUDA."""
    holder = placed.actor(_Gpus, "learner", num_gpus=placed.bundles["learner"]["GPU"]).remote()
    with environment_variable("CUDA_VISIBLE_DEVICES", ",".join(ray.get(holder.numbers.remote()))):
        yield


class _Gpus:
    """Ray actor that holds the learner's GPUs."""

    def numbers(self) -> list[str]:
        """Returns their numbers on this node."""
        return [str(number) for number in ray.get_gpu_ids()]


class _Placed:
    """A run's placement group, with a bundle for each of its processes."""

    def __init__(self, group: PlacementGroup, bundles: Bundles, namespace: str, address: str) -> None:
        self.bundles = bundles
        self.address = address
        """Address of this node for other nodes."""
        self._group = group
        self._namespace = namespace

    @property
    def complete(self) -> bool:
        """Whether every bundle has a node: a dead node leaves bundles without one."""
        state: str = placement_group_table(self._group)["state"]
        return state == "CREATED"

    def actor(self, kind: type, name: str, **options: Any) -> Any:
        """Returns the factory of a named Ray actor in the bundle of its name. Ray does not restart it."""
        bundle = list(self.bundles).index(name)
        return ray.remote(kind).options(
            name=name,
            namespace=self._namespace,
            num_cpus=self.bundles[name]["CPU"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            **options,
        )


class _Host:
    """Ray actor that runs one process of the run on its node."""

    def __init__(self, release: str, name: str, main: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if release != innet.__version__:
            raise RuntimeError(
                f"its node has innet-drl {innet.__version__}, and the learner's {release}: install the same release"
            )
        # As on the command line: idle OpenMP threads must not spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        # Otherwise the child process would import Ray's main module.
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._lock = threading.Lock()
        self._calls = 0
        self._messages: list[Any] = []
        self._launcher = LocalLauncher()
        self._process = (name, main, *arguments)

    def __repr__(self) -> str:
        # Ray prefixes each printed line of the process with it.
        return str(self._process[0])

    def node(self) -> str:
        """Returns the node's id."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    def messages(self, received: int) -> list[Any]:
        """Waits for messages of the process after the first `received`, and returns them. Starts it at first.

        All are kept: a reply may be lost with a connection.
        """
        with self._lock:
            if self._calls == 0:
                self._launcher.start(*self._process)
            self._calls += 1
            call = self._calls
        while True:
            with self._lock:
                self._messages += [message for _, message in self._launcher.messages()]
                # An earlier call, whose reply was lost, may still wait here.
                if len(self._messages) > received or call != self._calls:
                    return self._messages[received:]
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """Asks the process to end."""
        with self._lock:
            self._launcher.begin_end()


class RayLauncher(Launcher):
    """Starts processes in the bundles of a placement group, each as a child of a named Ray actor."""

    def __init__(self, placed: _Placed) -> None:
        host = f"[{placed.address}]" if ":" in placed.address else placed.address
        self.listen = f"innet://{host}:0"
        self._placed = placed
        self._hosts: dict[str, Any] = {}
        self._polls: dict[Any, str] = {}
        self._received: dict[str, int] = {}
        self._nodes: dict[str, Any] = {}
        self._started: dict[str, float] = {}

    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        """Starts the process as soon as its bundle has a node."""
        actor = self._placed.actor(_Host, name, max_concurrency=4)
        try:
            host = actor.remote(innet.__version__, name, main, arguments)
        except (ValueError, RayError) as error:
            raise ProcessError(f"{name} cannot be started by Ray: {_summary(error)}") from error
        self._hosts[name], self._nodes[name], self._started[name] = host, host.node.remote(), time.monotonic()
        self._received[name] = 0
        self._poll(name)

    def _poll(self, name: str) -> None:
        self._polls[self._hosts[name].messages.remote(self._received[name])] = name

    def messages(self) -> list[tuple[str, Any]]:
        """Returns the messages since the last call; processes of a dead node have ended."""
        received: list[tuple[str, Any]] = []
        for poll in self._ready(list(self._polls)):
            name, messages = self._polls.pop(poll), []
            try:
                messages = ray.get(poll)
            except ActorUnavailableError:
                # Ray does not know yet whether the node has died.
                pass
            except RayError as error:
                messages = [Ended(None, self._failure(name, error))]
            received += [(name, message) for message in messages]
            if messages and isinstance(messages[-1], Ended):
                self._forget(name)
            else:
                self._received[name] += len(messages)
                self._poll(name)
        self._name_unplaced()
        return received

    @staticmethod
    def _ready(refs: list[Any], seconds: float = 0.0, number: int | None = None) -> list[Any]:
        return ray.wait(refs, num_returns=number or len(refs), timeout=seconds)[0] if refs else []

    def _forget(self, name: str) -> None:
        ray.kill(self._hosts.pop(name))
        self._started.pop(name, None)
        self._polls = {poll: other for poll, other in self._polls.items() if other != name}

    def _failure(self, name: str, error: RayError) -> ProcessFailure:
        """Returns why a Ray actor has died, and its process with it."""
        if isinstance(error, RayActorError) and error.actor_init_failed:
            return ProcessFailure(_summary(error), fatal=True)
        node = self._nodes[name]
        home = None
        # The actor may have died before it reported its node.
        with contextlib.suppress(RayError):
            home = ray.get(node) if self._ready([node]) else None
        alive = any(each["NodeID"] == home and each["Alive"] for each in ray.nodes())
        return ProcessFailure(_summary(error), fatal=False, counts=alive)

    def _name_unplaced(self) -> None:
        """Logs each process without a node once."""
        for name, started in list(self._started.items()):
            if time.monotonic() - started < UNPLACED_SECONDS:
                continue
            if self._ready([self._nodes[name]]):
                del self._started[name]
            # Ray may detect a dead node late; until then the process may still start.
            elif not self._placed.complete:
                del self._started[name]
                bundle = ", ".join(f"{amount:g} {each}" for each, amount in self._placed.bundles[name].items())
                logger.warning("%s waits for a node with %s; the run continues without it", name, bundle)

    def begin_end(self) -> None:
        """Asks every process to end."""
        for host in self._hosts.values():
            host.end.remote()

    def close(self) -> None:
        """Ends every process; kills processes that do not end or have no node."""
        for name in list(self._hosts):
            if not self._ready([self._nodes[name]]):
                self._forget(name)
        self.begin_end()
        deadline = time.monotonic() + self.stop_seconds
        while self._hosts and (left := deadline - time.monotonic()) > 0:
            self._ready(list(self._polls), left, number=1)
            self.messages()
        for name in list(self._hosts):
            self._forget(name)


def _unusable(reason: str) -> ConfigurationError:
    return ConfigurationError(f"launcher ray: {reason}")


def _summary(error: BaseException) -> str:
    """The last line of a Ray error, which has the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()
