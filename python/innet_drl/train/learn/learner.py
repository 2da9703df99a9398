"""The learner: networks, optimizer and an update, from a sampled batch to its new priorities (Horgan et al., 2018).

Loops of a run sample the batches, and write the priorities to the memory. On CUDA an update is one graph of kernels
(`capture`); on a CPU, a second thread computes the targets of the next batch (`targets`).
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from innet_drl.torch_batches import TorchBatch
from innet_drl.train import losses
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.learn.capture import CapturedUpdate
from innet_drl.train.learn.checkpoints import load_network, under
from innet_drl.train.learn.data_parallel import SharedGradients
from innet_drl.train.networks import Network, make_network, published, space_to_depth
from innet_drl.train.observe.metrics import Meter
from innet_drl.train.observe.stopwatch import Stopwatch
from innet_drl.train.settings.machine import cores
from innet_drl.train.settings.slices import LearnerSettings

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_KEPT_BYTES = 1 << 30
"""Size above which freed blocks are returned to the kernel."""


class BatchWithTargets(TorchBatch):
    """A batch with the results of `Loss.targets`."""


@dataclass(frozen=True)
class Update:
    """The TD errors of one update, which may be on their way from a GPU."""

    td_error: Tensor
    """[B], |TD error|, unweighted; valid on the CPU after `copied`."""
    copied: torch.cuda.Event | None = None
    """Event after the copy of `td_error` to the CPU; `None` if the learner is on a CPU."""

    def priorities(self) -> NDArray[np.float64]:
        """Returns new priorities [B] of the batch's transitions; waits for this update only."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.td_error.double().numpy() + losses.PRIORITY_FLOOR


@dataclass(frozen=True)
class Numerics:
    """Arithmetic and memory layout of the learner."""

    dtype: torch.dtype = torch.float32
    layout: torch.memory_format = torch.contiguous_format
    space_to_depth: bool = False
    """Images with blocks of pixels as channels (`networks.space_to_depth`)."""

    def __str__(self) -> str:
        layout = "channels-last" if self.layout == torch.channels_last else "contiguous"
        layout = "space-to-depth" if self.space_to_depth else layout
        return f"{str(self.dtype).removeprefix('torch.')}, {layout}"


class _Scalars:
    """Numbers of the updates on the device: a graph of an update repeats its addresses, and reads new values there."""

    METRICS = ("td_loss", "q_mean", "gradient_norm", "sample_age", "priority_concentration")

    def __init__(self, device: torch.device) -> None:
        self.average_weight = torch.zeros((), device=device)
        """Weight of the newest network in the average."""
        self._sums = torch.zeros(len(self.METRICS), dtype=torch.float64, device=device)
        self._recorded = 0

    def add(self, *values: Tensor) -> None:
        """Adds an update's value of each of `METRICS`."""
        self._sums += torch.stack([value.double() for value in values])

    def record(self, meter: Meter, updates: int) -> None:
        """Records the means of the updates since the last call; waits for the device."""
        since, self._recorded = updates - self._recorded, updates
        meter.record_rate("learner_updates_per_s", since)
        for name, total in zip(self.METRICS, self._sums.tolist(), strict=True):
            if since > 0:
                meter.record_mean(name, total / since)
        self._sums.zero_()

    def resume(self, updates: int) -> None:
        """Begins at an update of an earlier session."""
        self._recorded = updates
        self._sums.zero_()


class Learner:
    """Online and target network, the average that is evaluated, optimizer and counters."""

    def __init__(self, config: LearnerSettings, spec: EnvironmentSpec, number: int = 0) -> None:
        self.config = config
        self.spec = spec
        self.device = choose_device(config, number)
        if self.device.type == "cpu" and spec.is_image:
            _keep_freed_memory()
        self.loss = losses.make_loss(config)
        self.network = make_network(config, spec).to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.average = copy.deepcopy(self.network).requires_grad_(False).eval()
        """The trained agent: a running average of the online network's weights. Single updates change the best action
        in many states; the average plays better than most of the averaged networks."""
        self._scalars = _Scalars(self.device)
        self.optimizer = torch.optim.Adam(
            self.network.parameters(),
            torch.tensor(config.learning_rate, device=self.device),
            eps=config.adam_epsilon,
            fused=True,
            capturable=self.device.type == "cuda",
        )
        self._weights_lock = threading.Lock()
        self.updates = 0
        self.publications = 0
        self.numerics = Numerics()
        self.gradients: SharedGradients | None = None
        """Averages the gradients of several learners; `None` for one learner."""
        self.stopwatch = Stopwatch()
        """Times the parts of `update`. On CUDA these are host times: kernels run asynchronously until a result is
        needed."""
        self.captured = CapturedUpdate(self._step) if self.obstacle is None else None
        """The update as a graph; `None` for launches one by one."""

    @property
    def obstacle(self) -> str | None:
        """Why updates of this learner are not captured; `None` if they are."""
        for reason, applies in (
            ("the learner is on the processor", self.device.type != "cuda"),
            ("capture off", self.config.capture == "off"),
            ("several learners average their gradients on the host, during an update", self.config.learners > 1),
            ("another thread computes the targets", self.targets_ahead),
        ):
            if applies:
                return reason
        return None

    @property
    def targets_ahead(self) -> bool:
        """Whether a second thread computes targets (`TargetsAhead`)."""
        if self.config.targets_ahead != "auto" or not self.loss.has_targets:
            return self.config.targets_ahead == "on" and self.loss.has_targets
        return self.device.type == "cpu" and self.spec.is_image and cores() > 1

    @property
    def threads_left(self) -> int:
        """Threads of each pass of the learner on a CPU, without the actors' cores.

        The threads of a pass synchronize many times in an update, so that one busy core delays all of them: on two
        cores with one actor, two threads took four times as long as one.
        """
        if self.config.serial:
            return cores()
        left = (cores() - self.config.actors * self.config.actor_threads) // self.config.learners
        return max(1, left // 2 if self.targets_ahead else left)

    def use(self, numerics: Numerics) -> None:
        """Switches to this arithmetic and layout."""
        self.numerics = numerics
        if self.spec.is_image:
            # A layout only affects four-dimensional weights, and changes no values.
            self.network.to(memory_format=numerics.layout)
            self.target.to(memory_format=numerics.layout)
            self.average.to(memory_format=numerics.layout)
        self._forget_capture()

    def update(self, batch: TorchBatch) -> Update:
        """Takes one step of the optimizer on a sampled batch on the learner's device; returns its new priorities.

        Several learners step with the mean of their gradients.
        """
        config = self.config
        self.optimizer.param_groups[0]["lr"].fill_(annealed_rate(config, self.updates))
        number = self.updates + 1
        # A decay that grows with the updates forgets the random initial weights.
        self._scalars.average_weight.fill_(1.0 - min(config.average_decay, number / (number + 10)))
        td_error = self._step(batch) if self.captured is None else self.captured(batch)
        self.updates = number
        if self.updates % config.target_period == 0:
            self._renew_target()
        update = Update(*_to_cpu(td_error))
        self.stopwatch.lap("optimizer")
        return update

    def _step(self, batch: TorchBatch) -> Tensor:
        """Computes an update on the device, and returns |TD error| [B]."""
        network = self.network
        if self.loss.has_targets and not isinstance(batch, BatchWithTargets):
            batch = self.with_targets(batch)
            self.stopwatch.lap("targets")
        with self._autocast():
            # Of double Q-learning: the Huber loss of d = target - Q(s, a), |d|, and Q(s, .).
            loss, td_error, q = self.loss(network, self.target, self._readable(batch))
        # Importance weights correct what prioritized sampling prefers.
        loss = (batch.weights * loss).mean()
        self.stopwatch.lap("forward")

        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.stopwatch.lap("backward")
        if self.gradients is not None:
            self.gradients.mean()
            self.stopwatch.lap("average gradients")
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), self.config.max_gradient_norm)
        with self._weights_lock:
            self.optimizer.step()

        with torch.no_grad():
            average: list[Tensor] = list(self.average.parameters())
            weights = [self._scalars.average_weight] * len(average)
            torch._foreach_lerp_(average, list(network.parameters()), weights)
            self._copy_buffers(self.average)
            q_mean = losses.of_actions(q, batch.action).float().mean()
            self._scalars.add(loss, q_mean, norm, batch.ages.double().mean(), batch.probabilities.mean())
        return td_error

    def _renew_target(self) -> None:
        if self.targets_ahead:
            # A new network: another thread may be computing with the old one.
            self.target = copy.deepcopy(self.network).requires_grad_(False)
        else:
            self.copy_network(self.target)

    def record(self, meter: Meter) -> None:
        """Records the metrics of the updates since the last call; waits for the device."""
        if self.updates > 0:
            meter.record("learning_rate", annealed_rate(self.config, self.updates - 1))
        self._scalars.record(meter, self.updates)

    def with_targets(self, batch: TorchBatch, chooser: Network | None = None) -> BatchWithTargets:
        """Returns the batch with the tensors of the loss that need no gradient, such as `target`.

        Of double Q-learning that is r + discount * Q_target(s', argmax_a Q(s', a)), n steps ahead. `chooser` is the
        network that chooses a, by default the online one. Any thread may call it.
        """
        names = ("next_observation", "observation") if self.loss.reads_policy else ("next_observation",)
        with torch.no_grad(), self._autocast():
            targets = self.loss.targets(self._readable(batch, *names), chooser or self.network, self.target)
        return BatchWithTargets(len(batch), {**batch.as_dict(), **targets})

    def try_loss(self, batch: TorchBatch) -> None:
        """Tries a user's loss, without learning from it."""
        loss = self.loss

        def compute(online: losses.Outputs, target: losses.Outputs, _: TorchBatch) -> Any:
            function = loss.function if isinstance(loss, losses.FunctionLoss) else loss
            return function(online, target, self._readable(self.with_targets(batch)))

        with self._autocast():
            losses.tried(loss, compute, self.network, self.target, self._readable(batch), "a random batch")

    @functools.cached_property
    def _has_buffers(self) -> bool:
        """Whether networks have buffers, such as vectors of spectral normalisation; most have none."""
        return any(True for _ in self.network.buffers())

    def _copy_buffers(self, to: Network) -> None:
        if self._has_buffers:
            for copied, buffer in zip(to.buffers(), self.network.buffers(), strict=True):
                copied.copy_(buffer)

    def copy_network(self, to: Network) -> None:
        """Copies the online network's weights, consistent within one update. Any thread may call it."""
        with torch.no_grad(), self._weights_lock:
            torch._foreach_copy_(list(to.parameters()), list(self.network.parameters()))
            self._copy_buffers(to)

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Returns the tensors of the actors' network and the number of updates, as they are published."""
        return published(self.average if self.config.publish == "average" else self.network, self.updates)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint: `model.*`, `target.*`, `average.*`, `optimizer.<parameter>.<moment>`."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model.{name}": value for name, value in self.network.state_dict().items()},
            **{f"target.{name}": value for name, value in self.target.state_dict().items()},
            **{f"average.{name}": value for name, value in self.average.state_dict().items()},
            **{f"optimizer.{index}.{name}": value for index, state in moments.items() for name, value in state.items()},
        }

    @property
    def finite(self) -> bool:
        """Whether every value of a checkpoint would be finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors().values())

    def load(self, tensors: dict[str, Tensor], updates: int, publications: int) -> None:
        """Loads a result of `tensors`, and its counters."""
        load_network(self.network, "model.", tensors)
        load_network(self.target, "target.", tensors)
        load_network(self.average, "average.", tensors)
        parameters = list(self.network.parameters())
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in under("optimizer.", tensors).items():
            index, moment = name.split(".", 1)
            parameter = parameters[int(index)]
            if value.shape == parameter.shape:
                # The fused optimizer needs moments in the memory layout of their weights.
                value = torch.empty_like(parameter).copy_(value)
            moments.setdefault(int(index), {})[moment] = value
        state = self.optimizer.state_dict()
        state["state"] = moments
        self.optimizer.load_state_dict(state)
        self.updates = updates
        self._scalars.resume(updates)
        self.publications = publications
        self._forget_capture()

    def _forget_capture(self) -> None:
        """Captures anew, as tensors have other addresses."""
        if self.captured is not None:
            self.captured = CapturedUpdate(self._step)

    def _readable(self, batch: TorchBatch, *names: str) -> TorchBatch:
        """Returns the batch with observations `names`, by default those of the loss, as networks read them."""
        names = names or (("observation",) if self.loss.has_targets else ("observation", "next_observation"))
        tensors = batch.as_dict()
        return TorchBatch(len(batch), {**tensors, **{name: self._prepare(tensors[name]) for name in names}})

    def _prepare(self, observation: Any) -> Any:
        if self.numerics.space_to_depth:
            return space_to_depth(observation, self.numerics.dtype)
        if self.spec.is_image:
            # Converted first, as transposing floats is faster than transposing bytes.
            images = observation.to(self.numerics.dtype)
            shape = self.spec.arrays[0].stacked(self.spec.stack)
            return images.reshape(-1, *shape).contiguous(memory_format=self.numerics.layout)
        # Torsos convert the parts of a dictionary.
        return observation if self.spec.parts else observation.float()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.numerics.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.numerics.dtype)


def annealed_rate(config: LearnerSettings, updates: int) -> float:
    """Returns Adam's step size of an update, the first one being 0."""
    start, end, over = config.learning_rate, config.learning_rate_final, config.learning_rate_anneal_updates
    return start if end is None else start + (end - start) * min(1.0, updates / over)


def use_device(device: torch.device) -> None:
    """Makes a GPU the current device of this thread, for pinned memory and streams in its context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_device(config: LearnerSettings, number: int = 0) -> torch.device:
    """Returns the device of `--device`: `auto` is CUDA if there is any, but the CPU in a serial run.

    Several learners are distributed over the GPUs.
    """
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigurationError(
            f"device cuda: torch {torch.__version__} finds no CUDA here: take device cpu, or install a torch with CUDA "
            "and a driver for it"
        )
    name = config.device
    if name == "auto":
        name = "cuda" if cuda and not config.serial else "cpu"
    if name == "cuda":
        # `torch.cuda.set_device` takes no device without an index.
        return torch.device("cuda", number % torch.cuda.device_count() if config.learners > 1 else 0)
    return torch.device(name)


def _to_cpu(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts copying values to the CPU; the event marks the end of the copy."""
    if values.device.type == "cpu":
        return values, None
    arriving = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    arriving.copy_(values, non_blocking=True)
    return arriving, torch.cuda.current_stream(values.device).record_event()


def _keep_freed_memory() -> None:
    """Keeps freed memory in this process, if the C library is glibc.

    glibc returns large blocks to the kernel, which zeroes each page of the next allocation: a fifth of an update on 128
    stacks of frames.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _KEPT_BYTES)
