"""The learner's mathematics: double Q-learning on prioritized n-step batches (Horgan et al., 2018).

What draws the batches and what is done with the new priorities is in `serial.py` and `launch.py`.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from innet_drl.batches import TorchBatch
from innet_drl.train.config import Config
from innet_drl.train.environments import Spec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.machine import cores
from innet_drl.train.networks import QNetwork, make_network

PRIORITY_FLOOR = 1e-6
"""Added to |TD error|, so that no transition is lost for ever (Schaul et al., 2016, section 3.3)."""


@dataclass(frozen=True)
class Update:
    """What one update found out; tensors stay on the device until they are read."""

    td_error: Tensor
    """[B], |target - Q|, not weighted; on its way to the CPU where `copied` says so."""
    loss: Tensor
    """The weighted Huber loss."""
    q_mean: Tensor
    """Mean Q-value of the taken actions."""
    copied: torch.cuda.Event | None = None
    """When `td_error` has arrived; `None` on a CPU."""

    def priorities(self) -> NDArray[np.float64]:
        """New priorities [B] of the batch's transitions; waits for this update, not for later ones."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.td_error.double().numpy() + PRIORITY_FLOOR


@dataclass(frozen=True)
class Numerics:
    """How the learner computes: an arithmetic and a memory layout."""

    dtype: torch.dtype = torch.float32
    layout: torch.memory_format = torch.contiguous_format

    def __str__(self) -> str:
        layout = "channels-last" if self.layout == torch.channels_last else "contiguous"
        return f"{str(self.dtype).removeprefix('torch.')}, {layout}"


class Gradients(Protocol):
    """What joins the gradients of several learners: `innet_drl.launch.learners.SharedGradients`."""

    def mean(self) -> None:
        """Replaces every `grad` of the network by its mean over all learners."""

    def end(self) -> None:
        """Tells all learners that training is over."""


class Learner:
    """Online and target network, the average that is evaluated, optimizer and counters.

    Args:
        config: The run's settings.
        spec: The environment's spec.
    """

    def __init__(self, config: Config, spec: Spec) -> None:
        self.config = config
        self.spec = spec
        self.device = choose_device(config)
        self.network = make_network(config, spec).to(self.device)
        self.target = make_network(config, spec).to(self.device).requires_grad_(False)
        self.target.load_state_dict(self.network.state_dict())
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        """The trained agent: a running average of the online network's weights. One update changes which action
        is the best in many states; the average plays better than most of the networks that it is made of."""
        self.optimizer = torch.optim.Adam(
            self.network.parameters(), config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        self._changing = threading.Lock()
        self.updates = 0
        self.publications = 0
        self.numerics = Numerics()
        self.gradients: Gradients | None = None
        """Where there are several learners; `None` for one alone."""

    @property
    def targets_ahead(self) -> bool:
        """Whether a second thread computes targets (`innet_drl.train.targets`)."""
        if self.config.targets_ahead != "auto":
            return self.config.targets_ahead == "on"
        return self.device.type == "cpu" and len(self.spec.frame_shape) == 2 and cores() > 1

    @property
    def threads_left(self) -> int:
        """Threads for each of the learner's passes on a CPU, so that actors and learner do not share cores.

        Two threads that compute together wait for each other many times in an update, and a busy core keeps
        both: on two cores with one actor, two threads took four times as long as one.
        """
        if self.config.serial:
            return cores()
        left = (cores() - self.config.actors * self.config.actor_threads) // self.config.learners
        return max(1, left // 2 if self.targets_ahead else left)

    def use(self, numerics: Numerics) -> None:
        """Computes in this way from now on."""
        self.numerics = numerics
        if len(self.spec.frame_shape) == 2:
            # A layout is a property of four-dimensional weights; the numbers stay the same.
            self.network.to(memory_format=numerics.layout)
            self.target.to(memory_format=numerics.layout)
            self.average.to(memory_format=numerics.layout)

    def targets(self, batch: TorchBatch, chooser: QNetwork | None = None) -> Tensor:
        """Returns r + discount * Q_target(s', argmax_a Q(s', a)) of a batch: float32 [B], on the learner's device.

        Args:
            batch: Transitions.
            chooser: The network that chooses a; the online one by default.
        """
        with torch.no_grad(), self._autocast():
            next_observation = self._prepare(batch.next_observation)
            best = (chooser or self.network)(next_observation).argmax(1, keepdim=True)
            bootstrap = self.target(next_observation).gather(1, best).squeeze(1).float()
            target: Tensor = batch.reward + batch.discount * bootstrap
            return target

    def update(self, batch: TorchBatch) -> Update:
        """One step of the optimizer on a batch on the learner's device.

        Loss: mean over the batch of weight * Huber(target - Q(s, a)), with Huber's threshold at 1 and the
        batch's own `target` where it has one (`innet_drl.train.targets`). Where there are several learners, the step is
        that of the mean of their gradients.
        """
        target = batch["target"] if "target" in batch else self.targets(batch)
        with self._autocast():
            values = self.network(self._prepare(batch.observation))
            q = values.gather(1, batch.action.long().unsqueeze(1)).squeeze(1).float()
        loss = (batch.weight * functional.huber_loss(q, target, reduction="none")).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.gradients is not None:
            self.gradients.mean()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.config.max_gradient_norm)
        with self._changing:
            self.optimizer.step()
        self.updates += 1
        self._average()
        if self.updates % self.config.target_period == 0:
            # A new one: another thread may be computing with the old one.
            self.target = copy.deepcopy(self.network).requires_grad_(False)
        detached = q.detach()
        td_error, copied = _to_cpu((target - detached).abs())
        return Update(td_error, loss.detach(), detached.mean(), copied)

    def _average(self) -> None:
        # The first weights are noise: a share that grows with the updates forgets them.
        decay = min(self.config.average_decay, self.updates / (self.updates + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.network.parameters()), 1.0 - decay)

    def copy_network(self, to: QNetwork) -> None:
        """Copies the online network's weights, all of the same update; from any thread."""
        with torch.no_grad(), self._changing:
            torch._foreach_copy_(list(to.parameters()), list(self.network.parameters()))

    def parameters(self) -> dict[str, NDArray[Any]]:
        """The online network as it is published: its tensors, and `updates`, the age of these parameters."""
        return published(self.network, self.updates)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint needs: `model.*`, `target.*`, `average.*` and `optimizer.<parameter>.<moment>`."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model.{name}": value for name, value in self.network.state_dict().items()},
            **{f"target.{name}": value for name, value in self.target.state_dict().items()},
            **{f"average.{name}": value for name, value in self.average.state_dict().items()},
            **{f"optimizer.{index}.{name}": value for index, state in moments.items() for name, value in state.items()},
        }

    @property
    def finite(self) -> bool:
        """Whether all that a checkpoint would hold is numbers."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors().values())

    def load(self, tensors: dict[str, Tensor], updates: int, publications: int) -> None:
        """Goes back to what `tensors` returned, at these counts."""
        self.network.load_state_dict(_under("model.", tensors))
        self.target.load_state_dict(_under("target.", tensors))
        self.average.load_state_dict(_under("average.", tensors))
        parameters = list(self.network.parameters())
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimizer.", tensors).items():
            index, moment = name.split(".", 1)
            parameter = parameters[int(index)]
            if value.shape == parameter.shape:
                # The fused optimizer walks through moments and weights side by side: in the same layout.
                value = torch.empty_like(parameter).copy_(value)
            moments.setdefault(int(index), {})[moment] = value
        state = self.optimizer.state_dict()
        state["state"] = moments
        self.optimizer.load_state_dict(state)
        self.updates = updates
        self.publications = publications

    def _prepare(self, observation: Tensor) -> Tensor:
        if len(self.spec.frame_shape) == 2:
            # Converted first: a transposing copy of single bytes takes longer than one of floats.
            return observation.to(self.numerics.dtype).contiguous(memory_format=self.numerics.layout)
        return observation.float()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.numerics.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.numerics.dtype)


UPDATES = "updates"
"""Name of the tensor that tells of which update published parameters are."""


def published(network: QNetwork, updates: int) -> dict[str, NDArray[Any]]:
    """A network's tensors, and how many updates made it."""
    tensors = {name: value.cpu().contiguous().numpy() for name, value in network.state_dict().items()}
    return {**tensors, UPDATES: np.array(updates, np.int64)}


def choose_device(config: Config) -> torch.device:
    """The device of `--device`: `auto` is CUDA where there is one, but the CPU in a serial run.

    Raises:
        ConfigurationError: CUDA is asked for, and torch finds none.
    """
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigurationError(
            f"--device cuda: torch {torch.__version__} finds no CUDA here: take --device cpu, or install a torch "
            "with CUDA and a driver for it"
        )
    if config.device == "auto":
        return torch.device("cuda" if cuda and not config.serial else "cpu")
    return torch.device(config.device)


def _to_cpu(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Starts copying values from a device, and says when they will be there."""
    if values.device.type == "cpu":
        return values, None
    arriving = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    arriving.copy_(values, non_blocking=True)
    return arriving, torch.cuda.current_stream(values.device).record_event()


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
