"""The replay buffer of Stable-Baselines3 on this memory."""

from __future__ import annotations

import inspect
import math
import tempfile
import weakref
from collections.abc import Mapping
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
from innet_drl import errors
from innet_drl.sb3.stream import Observation, Stream
from innet_drl.structures import check_part, map_leaves

_ROUNDING = 1e-5
"""Rounding of actions that SB3 scales to [-1, 1]."""


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


class InnetReplayBuffer(ReplayBuffer):
    """A replay buffer in this process or on a server, for `replay_buffer_class`.

    It takes the place of `ReplayBuffer`, `DictReplayBuffer` and `NStepReplayBuffer`. Each observation is stored once,
    also without `optimize_memory_usage`. The newest steps of an environment, at most `n_steps` + 8, are sampled later
    than in SB3's buffers: they wait for those that complete them. The first sample, pickling, `flush`, and a reset in
    the middle of an episode (a second `learn`) complete them at once: the episode counts as truncated there.

    Steps are read by `buffer.replay.episodes(buffer.table.name)`: there are no arrays `observations`, `actions`, ...
    SB3's algorithms scale the actions of a Box to [-1, 1]; the table has them in the environment's units.

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
        connection: Arguments of `innet_drl.connect` beside the address, such as `tls_ca` and `namespace`; the token is
            the environment variable INNET_TOKEN. The buffer connects with its first step or sample.
        samples_per_insert: Samples for each step that a server holds all its processes to; 0 sets no limit.
        min_size: Steps that a server has before the first sample, as `learning_starts` within one process.
        table: Name of the table.
        capacity_bytes: Bytes beyond which the oldest steps are evicted; 0 is enough for `buffer_size` uncompressed
            steps.
        timeout: Seconds that a call waits for a server.

    Raises:
        innet_drl.ReplayError: A space that cannot be stored, a server that does not answer, or another definition of
            the table there; the message says what to do.
        TypeError: `connection` has what `innet_drl.connect` does not take.
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
        connection: Mapping[str, Any] | None = None,
        samples_per_insert: float = 0.0,
        min_size: int = 1,
        table: str = "sb3",
        capacity_bytes: int = 0,
        timeout: float = 60.0,
    ) -> None:
        # Not `ReplayBuffer.__init__`, which allocates its arrays.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps, self.beta = n_steps, beta
        self.address, self._connection, self.timeout = address, dict(connection or {}), timeout
        if address is None and (samples_per_insert or connection or min_size != 1):
            raise errors.ConfigError(
                "connection, samples_per_insert and min_size need an address: in one process, gradient_steps and "
                "learning_starts are the algorithm's"
            )
        if self._connection.get("token"):
            raise errors.ConfigError(
                "connection takes no token, which a saved model would show: set the environment variable INNET_TOKEN"
            )
        # Arguments are checked here, because the buffer connects only with its first step.
        inspect.signature(innet.connect).bind(address, tables=[], **self._connection)
        self.table = innet.Table(
            table,
            self._columns(),
            # Not rounded, so that processes with other numbers of environments have the same table.
            max(buffer_size, 2 * (n_steps + 2) * n_envs),
            capacity_bytes=capacity_bytes,
            samples_per_insert=samples_per_insert,
            min_size=min_size,
            sampler="uniform" if priority_exponent is None else "prioritized",
            priority_exponent=priority_exponent or 0.0,
            # The discount of one step is 0 or 1: the algorithm applies its own gamma.
            view=innet.NStep(n=n_steps, gamma=gamma if n_steps > 1 else 1.0),
        )
        # Middle and half of the range of actions that SB3 scales; none if that is [-1, 1] already.
        self._units: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None
        self._largest = 1.0 + _ROUNDING
        """Bound of scaled actions, with their rounding in the environment's units and back."""
        if isinstance(action_space, spaces.Box) and not (action_space.low == -1).all() & (action_space.high == 1).all():
            low, high = (bound.astype(np.float64) for bound in (action_space.low, action_space.high))
            if not (np.isfinite(low) & np.isfinite(high) & (low < high)).all():
                raise errors.ConfigError(
                    f"SB3 scales actions by the bounds of their space, and {action_space} has none"
                )
            middle, half = (low + high) / 2, (high - low) / 2
            self._units = _fewest(middle), _fewest(half)
            self._largest += float(4 * np.finfo(np.float32).eps * (1 + np.abs(middle) / half).max())
        self._stream: Stream | None = None
        self._replay: innet.Replay | None = None
        self._open(None)

    @property
    def replay(self) -> innet.Replay:
        """The memory of this process, or the client of the server."""
        if self._replay is None:
            assert self.address is not None
            settings = {"timeout": self.timeout, **self._connection}
            self._replay = innet.connect(self.address, tables=[self.table], **settings)
        return self._replay

    def _columns(self) -> dict[str, Any]:
        space, shapes = self.observation_space, self.obs_shape
        columns: dict[str, Any] = {}
        if isinstance(space, spaces.Dict):
            # SB3 annotates them as one shape.
            for key, shape in cast(dict[str, tuple[int, ...]], shapes).items():
                check_part(key, "the observation space")
                columns[f"observation/{key}"] = (space[key].dtype, shape)
        else:
            columns["observation"] = (space.dtype, shapes)
        action = self.action_space
        dtype = np.float32 if isinstance(action, spaces.Box) else action.dtype
        return columns | {"action": (dtype, action.shape), "reward": "float32"}

    def _open(self, snapshot: bytes | None) -> None:
        """Makes the memory of this process, with the content of a snapshot. A server is connected to later."""
        self._stream = self._replay = None
        if self.address is not None:
            return
        # SB3 seeds NumPy's global generator before it makes the buffer.
        seed = int(np.random.randint(2**31))  # noqa: NPY002
        self._replay = memory = innet.Memory(() if snapshot else self.table, seed=seed)
        if snapshot:
            with tempfile.TemporaryDirectory(prefix="innet-") as folder:
                path = Path(folder) / "replay"
                path.write_bytes(snapshot)
                memory.restore(path)

    def _opened(self) -> Stream:
        if self._stream is None:
            largest = 1.0 + _ROUNDING if isinstance(self.action_space, spaces.Box) else math.inf
            self._stream = Stream(self.replay, self.table, self.n_envs, self.timeout, largest, self._unscaled)
            if self.address is not None:
                # A process that collects and ends sends its newest steps.
                weakref.finalize(self, self._stream.close)
        return self._stream

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
            obs: Observations (n_envs, ...), or a dictionary of them. Parts that its space lacks are ignored.
            next_obs: Observations after the step: at an episode's end its last one.
            action: Actions (n_envs, ...); of a Box scaled to [-1, 1], as `policy.scale_action` of SB3 does.
            reward: Rewards (n_envs,).
            done: Whether an episode ended.
            infos: With `TimeLimit.truncated` where it was cut off.

        Raises:
            innet_drl.SchemaError: Another shape than the space's, a part that is missing, NaN, or numbers that the
                space's dtype cannot hold, such as pixels in [0, 1], or an action outside [-1, 1]; nothing is stored.
            innet_drl.ReplayError: A server that does not answer. This step is not stored, and the next call tries the
                one before it again.
        """
        if self._stream is None and self.size() and (count := np.size(reward)) not in (0, self.n_envs):
            # The first step after a load, which may have another number of environments: the saved episodes have ended.
            self.buffer_size = max(self.table.capacity // count, 1)
            self.pos = min(self.pos * self.n_envs // count, self.buffer_size - 1)
            self.n_envs = count
        self._opened().put(obs, next_obs, action, reward, done, infos if self.handle_timeout_termination else None)
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def _unscaled(self, action: NDArray[Any]) -> NDArray[Any]:
        """The actions in the environment's units."""
        return action if self._units is None else action * self._units[1] + self._units[0]

    def sample(  # type: ignore[override]
        self, batch_size: int, env: VecNormalize | None = None
    ) -> WeightedSamples | WeightedDictSamples:
        """Samples transitions.

        Args:
            batch_size: Number of transitions B.
            env: Normalises observations and rewards.

        Returns:
            `ReplayBufferSamples` or `DictReplayBufferSamples` of tensors on `device`, with `weights` and `ids`.
            `discounts` is `None` without `n_steps`, and 0 where `dones` is 1.

        Raises:
            innet_drl.DeadlineError: There are no steps yet.
            innet_drl.SchemaError: The table has an action outside the space, of a data set in other units.
        """

        def tensor(array: NDArray[Any]) -> torch.Tensor:
            # It shares the batch's memory on the CPU.
            return torch.from_numpy(array).to(self.device)

        if self._stream is not None and not self._stream.sampled:
            self._stream.flush()
            self._stream.sampled = True
        # A memory of this process has no other writer to wait for.
        timeout = 0.0 if self.address is None else self.timeout
        batch: Any = self.replay.sample(self.table.name, batch_size, beta=self.beta, timeout=timeout)
        observation, following, reward = batch.observation, batch.next_observation, batch.reward
        if env is not None:
            if self.n_steps > 1 and env.norm_reward:
                raise errors.ConfigError(
                    "n-step returns are sums of rewards, and VecNormalize clips each reward: make it with "
                    "norm_reward=False, or use n_steps=1"
                )
            observation, following = self._normalize_obs(observation, env), self._normalize_obs(following, env)
            reward = self._normalize_reward(reward, env)
        discount = batch.discount.reshape(-1, 1)
        fields = (
            map_leaves(tensor, observation),
            tensor(self._scaled(batch.action)),
            map_leaves(tensor, following),
            tensor((discount == 0).astype(np.float32)),
            tensor(reward.reshape(-1, 1)),
            tensor(discount) if self.n_steps > 1 else None,
        )
        samples = WeightedDictSamples(*fields) if isinstance(observation, dict) else WeightedSamples(*fields)
        samples.weights = tensor(batch.weights.reshape(-1, 1))
        samples.ids = batch.ids
        return samples

    def _scaled(self, action: NDArray[Any]) -> NDArray[Any]:
        """The actions (B, action_dim) as SB3's algorithms take them."""
        middle, half = self._units or (0.0, 1.0)
        if self._units is not None:
            action -= middle
            action /= half
        if isinstance(self.action_space, spaces.Box) and not np.abs(action).max(initial=0.0) <= self._largest:
            row = np.abs(action).reshape(len(action), -1).max(1).argmax()
            raise errors.SchemaError(
                f"table {self.table.name!r} has the action {(action[row] * half + middle).tolist()} outside of "
                f"{self.action_space}: empty it (`reset`), and import a data set in the units of this space"
            )
        return action.reshape(len(action), -1)

    def update_priorities(self, ids: NDArray[np.uint64], td_errors: torch.Tensor | NDArray[Any]) -> None:
        """Sets the priorities of sampled transitions to |TD error| + 1e-6 (Schaul et al., 2016, section 3.3).

        Args:
            ids: `ids` of the samples.
            td_errors: TD errors (B,) or (B, 1).

        Raises:
            innet_drl.PriorityError: A TD error that is NaN or infinite.
        """
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().float().cpu().numpy()
        priorities = np.abs(td_errors.reshape(-1).astype(np.float64)) + 1e-6
        self.replay.update_priorities(self.table.name, ids, priorities, timeout=self.timeout)

    def flush(self) -> None:
        """Completes all steps, and returns when the replay has them: episodes that go on are truncated there.

        A process that only collects calls it at its end.
        """
        if self._stream is not None:
            self._stream.flush()

    def size(self) -> int:
        """Steps added by this buffer for each environment, at most `buffer_size`, as SB3's buffers count."""
        return self.buffer_size if self.full else self.pos

    def reset(self) -> None:
        """Removes all steps from the table."""
        super().reset()
        # Steps that are not yet sent would come after the table was emptied.
        self.flush()
        if self._stream is not None:
            self._stream.sampled = False
        self.replay.empty_table(self.table.name, self.timeout)

    @property
    def dones(self) -> dict[int, bool]:  # type: ignore[override]
        """Takes SB3's mark of a cut episode (`optimize_memory_usage`); `add` notices it by the observations."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The steps of this process; of a server only its address, to which the copy connects."""
        self.flush()
        state = {name: value for name, value in vars(self).items() if name not in ("_replay", "_stream")}
        if isinstance(self._replay, innet.Memory):
            with tempfile.TemporaryDirectory(prefix="innet-") as folder:
                path = Path(folder) / "replay"
                self._replay.save(path)
                state["snapshot"] = path.read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        snapshot = state.pop("snapshot", None)
        vars(self).update(state)
        self._open(snapshot)

    def __repr__(self) -> str:
        place = self.address or "in this process"
        return f"<InnetReplayBuffer {self.table.name!r} of {self.table.capacity} steps, {place}>"


def _fewest(bounds: NDArray[np.float64]) -> NDArray[np.float32]:
    """The bounds in float32, as one number where all are equal: NumPy applies it to a batch in half of the time."""
    first = bounds.reshape(-1)[0]
    return np.asarray(first if (bounds == first).all() else bounds, np.float32)
