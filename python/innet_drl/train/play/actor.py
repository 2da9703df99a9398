"""The actor: plays several environments with one network and writes their steps to the replay memory.

`Actor` is the body of the loop, also in a serial run; `innet_drl.launch.actors` runs it in a process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from innet_drl.structures import map_leaves
from innet_drl.train.environments import Arrays, Environments, Step
from innet_drl.train.memory import ReplayMemory, RowWriter
from innet_drl.train.networks import Network, load_published
from innet_drl.train.observe.metrics import ActorReport, Game, score_of
from innet_drl.train.observe.stopwatch import Stopwatch
from innet_drl.train.play.exploration import annealed, choose, epsilon_ladder
from innet_drl.train.settings.slices import ActorSettings


class Actor:
    """Plays `config.environments` environments.

    The exploration schedule continues from `first_step`, in agent steps of all actors, which also changes the seeds, as
    does the number `attempt` of earlier processes of this actor. Calls of the environments are in the context
    `watchdog`.
    """

    def __init__(
        self,
        config: ActorSettings,
        index: int,
        environments: Environments,
        network: Network,
        writer: RowWriter,
        *,
        first_step: int = 0,
        attempt: int = 0,
        stopwatch: Stopwatch | None = None,
        watchdog: AbstractContextManager[None] | None = None,
    ) -> None:
        environments.owner = f" of actor {index}"
        count = environments.count
        self.network = network.eval()
        self.random = np.random.default_rng([config.seed, index, first_step, *([attempt] if attempt else [])])
        self.stopwatch = stopwatch or Stopwatch()
        self._config = config
        self._index = index
        self._environments = environments
        self._writer = writer
        ladder = epsilon_ladder(config.all_environments, config.epsilon_base, config.epsilon_exponent)
        self._epsilon = ladder[index * count : (index + 1) * count]
        self._first_step = first_step
        self._version = 0
        self._parameter_updates = 0
        self._watchdog = watchdog or nullcontext()
        with self._watchdog:
            self._observation = environments.reset(int(self.random.integers(2**30)))
        self._episodes = Episodes(index * count, count)

    @property
    def final_epsilon(self) -> NDArray[np.float64]:
        """Probability of random actions in each environment, once it is annealed."""
        return self._epsilon

    def pull(self, memory: ReplayMemory) -> bool:
        """Loads newer parameters, if there are any; returns whether the actor has published parameters."""
        parameters = memory.get_parameters(newer_than=self._version)
        if parameters is not None:
            self._version = parameters.version
            self._parameter_updates = load_published(self.network, parameters.tensors)
        self.stopwatch.lap("parameters")
        return self._version > 0

    def _explores(self) -> NDArray[np.float64]:
        """Probability of a random action in each environment."""
        # An actor extrapolates the steps of all actors from its own: exact enough for exploration.
        all_steps = self._first_step + self._episodes.steps * self._config.playing_actors
        return annealed(self._epsilon, all_steps, self._config.epsilon_anneal_steps)

    def step(self) -> None:
        """Takes one action in each environment and writes the completed row."""
        q, episodes = self._q(self._observation), self._episodes
        action = choose(q, self._explores(), self.random)
        self.stopwatch.lap("inference")
        with self._watchdog:
            step = self._environments.step(action)
        self.stopwatch.lap("environment")
        last: dict[str, Any] = {"final": episodes.final}
        if step.final_observation is not None:
            last = self._last_observations(step)
        life_ends = step.life_lost if self._config.life_loss_ends else np.False_
        terminated = step.terminated | life_ends
        self._writer.append(
            frame=self._frame(self._observation),
            action=step.taken.astype(self._environments.spec.action_dtype),
            reward=np.sign(step.reward) if self._config.clip_rewards else step.reward,
            terminated=terminated,
            truncated=step.truncated & ~terminated,
            first=episodes.first,
            q=q,
            # `play` limits waits for the server or a slow learner.
            timeout=None,
            **last,
        )
        self.stopwatch.lap("write")
        episodes.add(step, resets_at_once=self._environments.resets_at_once)
        self._observation = step.observation
        self.stopwatch.lap("other")

    def report(self, *, times: bool = True) -> ActorReport:
        """Returns steps, games and, with `times`, times since the last report."""
        steps, games = self._episodes.take()
        return ActorReport(
            self._index,
            steps,
            games,
            self._parameter_updates,
            self.stopwatch.take() if times else {},
            {"epsilon": float(self._explores().mean())},
        )

    def _q(self, observation: Arrays) -> NDArray[np.float32]:
        with torch.inference_mode():
            q: NDArray[np.float32] = self.network.q(map_leaves(torch.from_numpy, observation)).numpy()
        return q

    def _frame(self, observation: Arrays) -> Arrays:
        stacked = self._environments.spec.stack > 1
        frame: Arrays = map_leaves(lambda array: np.ascontiguousarray(array[:, -1] if stacked else array), observation)
        return frame

    def _last_observations(self, step: Step) -> dict[str, Any]:
        """The columns with last observations of games that ended in this step (SAME_STEP)."""
        assert step.final_observation is not None
        q = self._q(step.final_observation)
        self.stopwatch.lap("inference")
        return {
            "final": step.terminated | step.truncated,
            "final_frame": self._frame(step.final_observation),
            "final_q": q,
        }


class Episodes:
    """Where the episodes of an actor's environments begin and end, and their games.

    Args:
        number: Number of the first environment, counted over all actors.
        count: Environments.
    """

    def __init__(self, number: int, count: int) -> None:
        self.first = np.ones(count, np.bool_)
        """Environments whose next row is the first of a game."""
        self.final = np.zeros(count, np.bool_)
        """Environments whose next row has the last observation of a game, and no action."""
        self.steps = 0
        self._number = number
        self._reported_steps = 0
        self._games: list[Game] = []
        self._scores = np.zeros(count, np.float64)
        self._lengths = np.zeros(count, np.int64)

    def add(self, step: Step, *, resets_at_once: bool) -> None:
        """Counts a step of all environments."""
        ended = step.terminated | step.truncated
        self._scores += step.reward
        self._lengths += ~self.final
        self.steps += int(np.count_nonzero(~self.final))
        for environment in map(int, np.flatnonzero(ended)):
            score, info = score_of(self._scores[environment]), step.infos.get(environment, {})
            self._games.append(Game(self._number + environment, score, int(self._lengths[environment]), info))
            self._scores[environment] = self._lengths[environment] = 0
        if resets_at_once:
            self.first = ended
        else:
            # The row after a game's last observation (the final row) is the first of the next game.
            self.first, self.final = self.final, ended

    def take(self) -> tuple[int, list[Game]]:
        """Returns the steps and the finished games since the last call."""
        games, self._games = self._games, []
        steps, self._reported_steps = self.steps - self._reported_steps, self.steps
        return steps, games
