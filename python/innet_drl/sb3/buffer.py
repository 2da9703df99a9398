"""The replay buffer of Stable-Baselines3 on this memory."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

import innet_drl as innet
from innet_drl.errors import ConfigError

Observation = NDArray[Any] | dict[str, NDArray[Any]]

_OPENED = ("replay", "_writer", "_pending", "_layout")
"""Attributes that `_open` sets anew in an unpickled buffer."""


class WeightedSamples(ReplayBufferSamples):
    """`ReplayBufferSamples` with what prioritized replay adds."""

    weights: torch.Tensor
    """Importance weights, float32 (B, 1), largest 1 (Schaul et al., 2016, section 3.4)."""
    ids: NDArray[np.uint64]
    """Ids (B,) for `InnetReplayBuffer.update_priorities`."""


class WeightedDictSamples(DictReplayBufferSamples):
    """`DictReplayBufferSamples` with what prioritized replay adds: see `WeightedSamples`."""

    weights: torch.Tensor
    ids: NDArray[np.uint64]


@dataclasses.dataclass
class _Transition:
    """One step of every environment, kept until the next one shows whether the episodes go on."""

    row: dict[str, Any]
    next_observation: Observation
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


class InnetReplayBuffer(ReplayBuffer):
    """A replay buffer in this process or on a server, for `replay_buffer_class`.

    It takes the place of `ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`. Each observation is stored once,
    also without `optimize_memory_usage`. The newest `n_steps + 1` steps of an environment are sampled later than in
    SB3's buffers: they wait for the steps that complete them. The first sample, pickling, and an observation that does
    not continue the step before (`learn` with a reset) complete them at once: the episode counts as truncated there.

    Steps are read by `buffer.replay.episodes(buffer.table.name)`: there are no arrays `observations`, `actions`, ...

    Args:
        buffer_size: Steps, of all environments together.
        observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of them.
        action_space: The algorithm's.
        device: Device of the sampled tensors.
        n_envs: Environments.
        optimize_memory_usage: Without effect: the memory is always saved.
        handle_timeout_termination: Bootstraps where `infos` have `TimeLimit.truncated`.
        n_steps: Steps of a return, across which `gamma` discounts. Give both in `replay_buffer_kwargs`, as an
            algorithm's `n_steps` is for SB3's own buffers.
        gamma: Discount of one step, used with `n_steps` above 1.
        priority_exponent: Samples in proportion to priority^priority_exponent; `None` samples uniformly. Only
            algorithms that call `update_priorities` gain by it, such as `PrioritizedDQN`.
        beta: Exponent of the importance weights.
        address: A server (`innet://host:7710`) that other processes may use, too; `None` keeps the steps in this one.
        table: Name of the table.
        capacity_bytes: Bytes beyond which the oldest steps are evicted; 0 is enough for `buffer_size` uncompressed
            steps.
        timeout: Seconds that a call waits for a server.

    Raises:
        innet_drl.ReplayError: A space that cannot be stored, a server that does not answer, or another definition of
            the table there; the message says what to do.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        priority_exponent: float | None = None,
        beta: float = 0.4,
        address: str | None = None,
        table: str = "sb3",
        capacity_bytes: int = 0,
        timeout: float = 60.0,
    ) -> None:
        # Not `ReplayBuffer.__init__`, which allocates its arrays.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.gamma, self.beta = n_steps, gamma, beta
        self._address, self._timeout = address, timeout
        self.table = innet.Table(
            table,
            self._columns(),
            max(self.buffer_size, n_steps + 2) * n_envs,
            capacity_bytes=capacity_bytes,
            sampler="uniform" if priority_exponent is None else "prioritized",
            priority_exponent=priority_exponent or 0.0,
            # The discount of one step is 0 or 1: the algorithm applies its own gamma.
            view=innet.NStep(n=n_steps, gamma=gamma if n_steps > 1 else 1.0),
        )
        self._open(None)

    def _columns(self) -> dict[str, Any]:
        space, shapes = self.observation_space, self.obs_shape
        if isinstance(space, spaces.Dict):
            # SB3 annotates them as one shape.
            by_key = cast(dict[str, tuple[int, ...]], shapes)
            columns: dict[str, Any] = {f"observation/{key}": (space[key].dtype, shape) for key, shape in by_key.items()}
        else:
            columns = {"observation": (space.dtype, shapes)}
        columns["action"] = (self._maybe_cast_dtype(self.action_space.dtype), (self.action_dim,))
        return columns | {"reward": "float32"}

    def _open(self, snapshot: bytes | None) -> None:
        """Opens the replay, with the content of a snapshot."""
        self._pending: _Transition | None = None
        self._sampled = False
        self._layout = self.table.columns
        self.replay: innet.Replay
        if self._address is not None:
            self.replay = innet.connect(self._address, tables=[self.table], timeout=self._timeout)
        else:
            # SB3 seeds NumPy's global generator before it makes the buffer.
            seed = int(np.random.randint(2**31))  # noqa: NPY002
            memory = innet.Memory(() if snapshot else self.table, seed=seed)
            if snapshot:
                with tempfile.TemporaryDirectory(prefix="innet-") as folder:
                    path = Path(folder) / "replay"
                    path.write_bytes(snapshot)
                    memory.restore(path)
            self.replay = memory
        steps = self.table.capacity // self.n_envs
        self._writer = self.replay.writer(
            self.table.name, self.n_envs, self.table.view, chunk_steps=max(1, min(50, steps - self.n_steps - 1))
        )

    def add(
        self,
        obs: Observation,
        next_obs: Observation,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Stores one step of every environment.

        Args:
            obs: Observations (n_envs, ...), or a dictionary of them.
            next_obs: Observations after the step: at an episode's end its last one.
            action: Actions (n_envs, ...).
            reward: Rewards (n_envs,).
            done: Whether an episode ended.
            infos: With `TimeLimit.truncated` where it was cut off.

        Raises:
            innet_drl.ReplayError: NaN in the step before this one, or a server that does not answer: that step is tried
                again by the next call, and this one is not stored.
        """
        observation, done = self._shaped(obs), np.asarray(done, bool).reshape(self.n_envs)
        self._complete(observation)
        truncated = np.zeros(self.n_envs, bool)
        if self.handle_timeout_termination:
            truncated[:] = [info.get("TimeLimit.truncated", False) for info in infos]
            truncated &= done
        row = {
            "observation": observation,
            "action": self._column("action", action),
            "reward": self._column("reward", reward),
        }
        self._pending = _Transition(row, self._shaped(next_obs), done & ~truncated, truncated)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def _shaped(self, observation: Observation) -> Observation:
        """A copy in the shape and dtype of the columns: the caller may write to its arrays."""
        if isinstance(observation, dict):
            return {key: self._column(f"observation/{key}", value) for key, value in observation.items()}
        return self._column("observation", observation)

    def _column(self, name: str, values: NDArray[Any]) -> NDArray[Any]:
        column = self._layout[name]
        return np.array(values, column.dtype).reshape(self.n_envs, *column.shape)

    def _complete(self, following: Observation | None) -> None:
        """Appends the pending step. Episodes that `following` does not continue end with it, truncated."""
        step = self._pending
        if step is None:
            return
        ended = step.terminated | step.truncated
        truncated = step.truncated | ~(ended | self._continues(step.next_observation, following))
        columns: dict[str, Any] = dict(step.row)
        if (ended | truncated).any():
            columns["final_observation"] = step.next_observation
        self._writer.append(terminated=step.terminated, truncated=truncated, timeout=self._timeout, **columns)
        # Only now: after an error the step is tried again.
        self._pending = None

    def _continues(self, last: Observation, following: Observation | None) -> NDArray[np.bool_]:
        if following is None:
            return np.zeros(self.n_envs, bool)
        if isinstance(last, dict):
            assert isinstance(following, dict)
            continues: NDArray[np.bool_] = np.all([_equal(last[key], following[key]) for key in last], axis=0)
            return continues
        assert not isinstance(following, dict)
        return _equal(last, following)

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> WeightedSamples | WeightedDictSamples:
        """Samples transitions.

        Args:
            batch_size: Number of transitions B.
            env: Normalises observations and rewards.

        Returns:
            `ReplayBufferSamples` or `DictReplayBufferSamples` of tensors on `device`, with `weights` and `ids`.
            `discounts` is `None` without `n_steps`. Where `dones` is 1, `next_observations` and `discounts` are 0.

        Raises:
            innet_drl.DeadlineError: There are no steps yet.
        """
        if not self._sampled:
            self.flush()
            self._sampled = True
        # Nobody else writes to a memory of this process: waiting would not help.
        timeout = 0.0 if self._address is None else self._timeout
        batch: Any = self.replay.sample(self.table.name, batch_size, beta=self.beta, timeout=timeout)
        observation, following, reward = batch.observation, batch.next_observation, batch.reward
        if env is not None:
            if self.n_steps > 1 and env.norm_reward:
                raise ConfigError(
                    "n-step returns are sums of rewards, and VecNormalize clips each reward: make it with "
                    "norm_reward=False, or use n_steps=1"
                )
            observation, following = self._normalize_obs(observation, env), self._normalize_obs(following, env)
            reward = self._normalize_reward(reward, env)
        discount = batch.discount.reshape(-1, 1)
        fields = (
            self._tensors(observation),
            self._tensors(batch.action),
            self._tensors(following),
            self._tensors((discount == 0).astype(np.float32)),
            self._tensors(reward.reshape(-1, 1)),
            self._tensors(discount) if self.n_steps > 1 else None,
        )
        samples = WeightedDictSamples(*fields) if isinstance(observation, dict) else WeightedSamples(*fields)
        samples.weights = self._tensors(batch.weights.reshape(-1, 1))
        samples.ids = batch.ids
        return samples

    def _tensors(self, arrays: Any) -> Any:
        """Tensors on the device, which share the batch's memory on the CPU."""
        if isinstance(arrays, dict):
            return {key: self._tensors(array) for key, array in arrays.items()}
        return torch.from_numpy(arrays).to(self.device)

    def update_priorities(self, ids: NDArray[np.uint64], td_errors: torch.Tensor | NDArray[Any]) -> None:
        """Sets the priorities of sampled transitions to |TD error| + 1e-6 (Schaul et al., 2016, section 3.3).

        Args:
            ids: `ids` of the samples.
            td_errors: TD errors (B,) or (B, 1).

        Raises:
            innet_drl.PriorityError: A TD error that is NaN or infinite.
        """
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().cpu().numpy()
        priorities = np.abs(td_errors.reshape(-1).astype(np.float64)) + 1e-6
        self.replay.update_priorities(self.table.name, ids, priorities, timeout=self._timeout)

    def flush(self) -> None:
        """Completes all steps, and returns when the replay has them: episodes that go on are truncated there.

        A process that only collects calls it at its end.
        """
        self._complete(None)
        self._writer.flush(self._timeout)

    def size(self) -> int:
        """Steps added by this buffer for each environment, at most `buffer_size`, as SB3's buffers count."""
        return self.buffer_size if self.full else self.pos

    def reset(self) -> None:
        """Removes all steps from the table."""
        super().reset()
        self._pending, self._sampled = None, False
        self.replay.empty_table(self.table.name)

    @property
    def dones(self) -> _Ends:  # type: ignore[override]
        """Takes the assignment by which `learn` cuts off the last episode, with `optimize_memory_usage`."""
        return _Ends(self)

    def __getstate__(self) -> dict[str, Any]:
        """The steps of this process; of a server only its address, to which the copy connects."""
        self.flush()
        state = {name: value for name, value in vars(self).items() if name not in _OPENED}
        if isinstance(self.replay, innet.Memory):
            with tempfile.TemporaryDirectory(prefix="innet-") as folder:
                path = Path(folder) / "replay"
                self.replay.save(path)
                state["snapshot"] = path.read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        snapshot = state.pop("snapshot", None)
        vars(self).update(state)
        self._open(snapshot)

    def __repr__(self) -> str:
        place = self._address or "in this process"
        return f"<InnetReplayBuffer {self.table.name!r} of {self.table.capacity} steps, {place}>"


class _Ends:
    """Assignments to `dones`."""

    def __init__(self, buffer: InnetReplayBuffer) -> None:
        self._buffer = buffer

    def __setitem__(self, position: object, value: object) -> None:
        self._buffer._complete(None)


def _equal(last: NDArray[Any], following: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether the arrays are equal, by environment."""
    found: NDArray[np.bool_] = (last == following).reshape(len(last), -1).all(axis=1)
    return found
