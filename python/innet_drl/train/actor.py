"""The actor: plays several environments with one network and writes what happens to the replay memory.

`Actor` is the loop's body and runs in a serial run too; `innet_drl.launch.processes` puts it into a process.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.train.config import Config
from innet_drl.train.environments import Environments, Spec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.exploration import annealed, choose, epsilon_ladder
from innet_drl.train.learner import UPDATES
from innet_drl.train.metrics import ActorReport, Game, Stopwatch
from innet_drl.train.networks import QNetwork

IMAGE_BYTES = 2_000
"""Of the memory for each step of an Atari game: packed, Breakout takes 409 on average and Seaquest 741."""
IMAGE_OVERHEAD_BYTES = 128
"""More than a step takes beside its image."""


def make_table(config: Config, spec: Spec, name: str) -> innet.Table:
    """The replay memory of a run: one frame a step, of which the view makes stacks, or one vector."""
    columns = {"frame": (spec.frame_dtype, spec.frame_shape), "action": spec.action_dtype, "reward": "float32"}
    return table_of(columns, config, name, _capacity_bytes(config, spec))


def table_of(columns: dict[str, Any], config: Config, name: str, capacity_bytes: int) -> innet.Table:
    """A table of these columns with the run's capacity, priorities and replay ratio."""
    return innet.Table(
        name,
        columns,
        config.capacity,
        capacity_bytes=capacity_bytes,
        sampler="prioritized",
        priority_exponent=config.priority_exponent,
        # A serial run keeps these by itself: one thread cannot wait for itself.
        min_size=1 if config.serial else config.min_size,
        samples_per_insert=0.0 if config.serial else config.samples_per_insert,
        slack=0.0 if config.serial else config.slack,
    )


def _capacity_bytes(config: Config, spec: Spec) -> int:
    """Bytes at which a memory of images evicts, and which a server keeps free for it; 0, the raw size, for vectors."""
    if len(spec.frame_shape) != 2:
        return 0
    # Learning starts even if no frame can be packed.
    raw = IMAGE_OVERHEAD_BYTES + math.prod(spec.frame_shape)
    return max(config.capacity * IMAGE_BYTES, min(2 * config.min_size, config.capacity) * raw)


def embedded_memory(config: Config, table: innet.Table) -> innet.Replay:
    """The memory of a run without a server.

    Raises:
        ConfigurationError: There is no room for the table.
    """
    try:
        return innet.Replay([table], max_bytes=config.max_bytes, seed=config.seed)
    except innet.errors.TableError as error:
        raise ConfigurationError(f"no room for the memory ({error}): lower --capacity, or raise --max-bytes") from error


def make_view(config: Config, spec: Spec) -> innet.NStep:
    """Transitions as the learner reads them and the writer must leave them."""
    return innet.NStep(stack=spec.stack, n=config.n_step, gamma=config.gamma, observation="frame")


def open_writer(replay: innet.Replay, config: Config, spec: Spec, name: str, actor: int) -> innet.Writer:
    """The writer of one actor's environments."""
    return replay.writer(
        name,
        config.environments,
        make_view(config, spec),
        name=f"actor {actor}",
        chunk_steps=config.chunk_steps,
    )


class RowWriter(Protocol):
    """Takes what an actor plays: `innet_drl.Writer`, or something in its place."""

    def append(self, *, terminated: Any, truncated: Any, first: Any, **columns: Any) -> None:
        """Takes one row of every environment."""

    def flush(self) -> None:
        """Waits until what was sent has arrived."""

    def close(self, timeout: float | None = None) -> None:
        """Sends what is not sent, within `timeout` seconds."""


class ParameterSource(Protocol):
    """Where an actor's parameters come from: `innet_drl.Replay`, or something in its place."""

    def get_parameters(self, name: str, newer_than: int = 0) -> PublishedParameters | None:
        """The newest parameters of this name, or `None` where they are not newer."""


class PublishedParameters(Protocol):
    """One version of the parameters."""

    @property
    def version(self) -> int:
        """Rises with every publication."""

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """By name."""


class Actor:
    """Plays `config.environments` environments.

    Args:
        config: The run's settings.
        index: Number of this actor, from 0.
        environments: What it plays.
        network: Its network; `pull` fills it.
        writer: Where the rows go.
        first_step: Agent steps that all actors took in earlier sessions: exploration goes on from there, and
            the games are others than in those.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        environments: Environments,
        network: QNetwork,
        writer: RowWriter,
        *,
        first_step: int = 0,
    ) -> None:
        count = environments.count
        self.network = network.eval()
        self.random = np.random.default_rng([config.seed, index, first_step])
        self.stopwatch = Stopwatch()
        self._config = config
        self._index = index
        self._environments = environments
        self._writer = writer
        ladder = epsilon_ladder(config.all_environments, config.epsilon_base, config.epsilon_exponent)
        self._epsilon = ladder[index * count : (index + 1) * count]
        self._first_step = first_step
        self._steps = 0
        self._reported_steps = 0
        self._version = 0
        self._parameter_updates = 0
        self._games: list[Game] = []
        self._observation = environments.reset(int(self.random.integers(2**30)))
        self._first = np.ones(count, np.bool_)
        self._final = np.zeros(count, np.bool_)
        self._scores = np.zeros(count, np.float64)

    def pull(self, replay: ParameterSource, name: str) -> None:
        """Takes the newest parameters of this name, where there are newer ones."""
        parameters = replay.get_parameters(name, newer_than=self._version)
        if parameters is not None:
            self._version = parameters.version
            tensors = {name: torch.tensor(value) for name, value in parameters.tensors.items()}
            self._parameter_updates = int(tensors.pop(UPDATES))
            self.network.load_state_dict(tensors)
        self.stopwatch.lap("parameters")

    def step(self) -> None:
        """Takes one action in each environment and writes the row that it completes."""
        with torch.inference_mode():
            q: NDArray[np.float32] = self.network(torch.from_numpy(self._observation)).numpy()
        self.stopwatch.lap("inference")
        # Each actor takes its own pace for everyone's: close enough for exploration, and nothing to ask for.
        everyones = self._first_step + self._steps * self._config.playing_actors
        epsilon = annealed(self._epsilon, everyones, self._config.epsilon_anneal_steps)
        action = choose(q, epsilon, self.random)
        step = self._environments.step(action)
        self.stopwatch.lap("environment")
        life_ends = step.life_lost if self._config.life_loss_ends else np.False_
        terminated = step.terminated | life_ends
        self._writer.append(
            frame=self._frame(),
            action=action.astype(self._environments.spec.action_dtype),
            reward=np.sign(step.reward) if self._config.clip_rewards else step.reward,
            terminated=terminated,
            truncated=step.truncated & ~terminated,
            first=self._first,
            final=self._final,
            q=q,
        )
        self.stopwatch.lap("write")
        self._count(step.reward, step.terminated | step.truncated)
        self._observation = step.observation

    def report(self) -> ActorReport:
        """What happened since the last report."""
        games, self._games = self._games, []
        steps, self._reported_steps = self._steps - self._reported_steps, self._steps
        return ActorReport(self._index, steps, games, self._parameter_updates, self.stopwatch.take())

    def state(self) -> dict[str, Any]:
        """Everything but the network that the next steps depend on, as plain JSON values."""
        return {
            "environments": self._environments.state(),
            "random": self.random.bit_generator.state,
            "observation": self._observation.tolist(),
            "first": self._first.tolist(),
            "final": self._final.tolist(),
            "scores": self._scores.tolist(),
            "first_step": self._first_step,
            "steps": self._steps,
            "parameter_updates": self._parameter_updates,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to what `state` returned."""
        self._environments.restore(state["environments"])
        self.random.bit_generator.state = state["random"]
        self._observation = np.array(state["observation"], self._observation.dtype)
        self._first = np.array(state["first"], np.bool_)
        self._final = np.array(state["final"], np.bool_)
        self._scores = np.array(state["scores"], np.float64)
        self._first_step = state["first_step"]
        self._steps = self._reported_steps = state["steps"]
        self._parameter_updates = state["parameter_updates"]

    def close(self, timeout: float | None = None) -> None:
        """Sends the rows that are not sent, within `timeout` seconds, and frees the environments."""
        try:
            self._writer.close(timeout)
        finally:
            self._environments.close()

    def _frame(self) -> NDArray[Any]:
        newest = self._observation[:, -1] if self._environments.spec.stack > 1 else self._observation
        return np.ascontiguousarray(newest)

    def _count(self, reward: NDArray[np.float32], ended: NDArray[np.bool_]) -> None:
        self._scores += reward
        self._steps += int(np.count_nonzero(~self._final))
        for environment in np.flatnonzero(ended):
            number = self._index * self._environments.count + int(environment)
            self._games.append(Game(number, float(self._scores[environment])))
            self._scores[environment] = 0.0
        # After the last observation of a game (the final row) comes the first of the next.
        self._first = self._final
        self._final = ended
