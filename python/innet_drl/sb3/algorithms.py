"""Algorithms of Stable-Baselines3 with prioritized replay (Schaul et al., 2016).

Their losses are SB3's with the importance weight of each transition; its priority becomes |TD error|. Beta rises
linearly to 1 over training (section 3.4).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import polyak_update
from torch.nn import functional

from innet_drl.errors import ConfigError
from innet_drl.sb3.buffer import InnetReplayBuffer, WeightedSamples


class _Prioritized(OffPolicyAlgorithm):
    """The prioritized buffer of an algorithm.

    Keyword arguments of the algorithm, and:

    Args:
        priority_exponent: Alpha; 0 samples uniformly.
        beta: Exponent of the importance weights at the beginning of `learn`.
    """

    def __init__(self, *args: Any, priority_exponent: float = 0.6, beta: float = 0.4, **kwargs: Any) -> None:
        self.priority_exponent, self.beta = priority_exponent, beta
        super().__init__(*args, **kwargs)

    def _setup_model(self) -> None:
        # Here, and not in `__init__`, because `load` sets the attributes between the two.
        name, given = type(self).__name__, self.replay_buffer_kwargs
        self.replay_buffer_class = self.replay_buffer_class or InnetReplayBuffer
        if not issubclass(self.replay_buffer_class, InnetReplayBuffer):
            raise ConfigError(f"{name} updates priorities: its replay_buffer_class is InnetReplayBuffer")
        if self.n_steps == 1:
            self.n_steps = given.get("n_steps", 1)
        settings = {"priority_exponent": self.priority_exponent, "n_steps": self.n_steps, "gamma": self.gamma}
        for setting, value in {**settings, "beta": self.beta}.items():
            if value is None or given.get(setting, value) != value:
                raise ConfigError(
                    f"{setting} of {name} is {value}, and {given.get(setting)} in replay_buffer_kwargs: "
                    f"give a number to {name} alone"
                )
        self.replay_buffer_kwargs = {**given, **settings}
        try:
            with warnings.catch_warnings():
                # They are given.
                warnings.filterwarnings("ignore", "`n_steps=.*` is ignored")
                super()._setup_model()
        finally:
            self.replay_buffer_kwargs = given

    def load_replay_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Loads a saved buffer.

        Raises:
            ConfigError: It does not sample by priority.
        """
        super().load_replay_buffer(*args, **kwargs)
        buffer = self.replay_buffer
        if not isinstance(buffer, InnetReplayBuffer) or buffer.table.sampler != "prioritized":
            self.replay_buffer = None
            raise ConfigError(f"{type(self).__name__} updates priorities, and the loaded buffer has none: {buffer!r}")

    def _sample(self, batch_size: int) -> tuple[InnetReplayBuffer, WeightedSamples, torch.Tensor | float]:
        """The buffer, a batch, and the discount of its next values."""
        buffer = cast(InnetReplayBuffer, self.replay_buffer)
        # The last rollout may pass the end of training.
        buffer.beta = 1.0 - (1.0 - self.beta) * max(self._current_progress_remaining, 0.0)
        batch = cast(WeightedSamples, buffer.sample(batch_size, env=self._vec_normalize_env))
        return buffer, batch, self.gamma if batch.discounts is None else batch.discounts

    def _log_updates(self, updates: int, **values: list[float]) -> None:
        self._n_updates += updates
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/beta", cast(InnetReplayBuffer, self.replay_buffer).beta)
        for name, numbers in values.items():
            self.logger.record(f"train/{name}", np.mean(numbers))


class PrioritizedDQN(_Prioritized, DQN):
    """`stable_baselines3.DQN` with prioritized replay.

    Keyword arguments are DQN's, and `priority_exponent` (0.6) and `beta` (0.4).
    """

    def train(self, gradient_steps: int, batch_size: int = 100) -> None:
        """Takes steps of the optimizer; the loss is the mean of weight * Huber(TD error)."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        losses = []
        for _ in range(gradient_steps):
            buffer, batch, discount = self._sample(batch_size)
            with torch.no_grad():
                value = self.q_net_target(batch.next_observations).max(dim=1, keepdim=True).values
                target = batch.rewards + (1 - batch.dones) * discount * value
            q = self.q_net(batch.observations).gather(1, batch.actions.long())
            loss = (batch.weights * functional.smooth_l1_loss(q, target, reduction="none")).mean()
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()
            buffer.update_priorities(batch.ids, target - q)
            losses.append(loss.item())
        self._log_updates(gradient_steps, loss=losses)


class PrioritizedSAC(_Prioritized, SAC):
    """`stable_baselines3.SAC` with prioritized replay. The priority is the mean |TD error| of the critics.

    Keyword arguments are SAC's, and `priority_exponent` (0.6) and `beta` (0.4).
    """

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Takes steps of the optimizers.

        The critics' losses are weighted. The losses of actor and temperature, which have no TD error, are not.
        """
        self.policy.set_training_mode(True)
        optimizers = [self.actor.optimizer, self.critic.optimizer]
        if self.ent_coef_optimizer is not None:
            optimizers.append(self.ent_coef_optimizer)
        self._update_learning_rate(optimizers)
        found: dict[str, list[float]] = {}

        def log(**values: torch.Tensor) -> None:
            for name, value in values.items():
                found.setdefault(name, []).append(value.item())

        for step in range(gradient_steps):
            buffer, batch, discount = self._sample(batch_size)
            if self.use_sde:
                self.actor.reset_noise()
            actions, log_probability = self.actor.action_log_prob(batch.observations)
            log_probability = log_probability.reshape(-1, 1)
            temperature = self._temperature(log_probability, log)
            with torch.no_grad():
                next_actions, next_log_probability = self.actor.action_log_prob(batch.next_observations)
                values = torch.cat(self.critic_target(batch.next_observations, next_actions), dim=1)
                value = values.min(dim=1, keepdim=True).values - temperature * next_log_probability.reshape(-1, 1)
                target = batch.rewards + (1 - batch.dones) * discount * value
            errors = torch.cat(self.critic(batch.observations, batch.actions), dim=1) - target
            critic_loss = 0.5 * (batch.weights * errors.square()).mean(dim=0).sum()
            _step(self.critic.optimizer, critic_loss)
            q = torch.cat(self.critic(batch.observations, actions), dim=1).min(dim=1, keepdim=True).values
            actor_loss = (temperature * log_probability - q).mean()
            _step(self.actor.optimizer, actor_loss)
            if step % self.target_update_interval == 0:
                polyak_update(self.critic.parameters(), self.critic_target.parameters(), self.tau)
                polyak_update(self.batch_norm_stats, self.batch_norm_stats_target, 1.0)
            buffer.update_priorities(batch.ids, errors.abs().mean(dim=1))
            log(ent_coef=temperature, critic_loss=critic_loss, actor_loss=actor_loss)
        self._log_updates(gradient_steps, **found)

    def _temperature(self, log_probability: torch.Tensor, log: Callable[..., None]) -> torch.Tensor:
        """The entropy's coefficient before this step's update of it."""
        if self.ent_coef_optimizer is None or self.log_ent_coef is None:
            return self.ent_coef_tensor
        temperature = self.log_ent_coef.detach().exp()
        loss = -(self.log_ent_coef * (log_probability + cast(float, self.target_entropy)).detach()).mean()
        _step(self.ent_coef_optimizer, loss)
        log(ent_coef_loss=loss)
        return temperature


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
