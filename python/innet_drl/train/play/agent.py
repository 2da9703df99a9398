"""A trained agent, read from the folder of a run."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from innet_drl.structures import map_leaves
from innet_drl.train import environments
from innet_drl.train.environments import Environments
from innet_drl.train.errors import TrainingError, shortened
from innet_drl.train.learn.checkpoints import load_network
from innet_drl.train.networks import Network, make_network, q_values
from innet_drl.train.play.exploration import choose
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import Config


class Agent:
    """A trained agent on the CPU. `load` reads one.

    Args:
        config: The run's settings.
        network: The agent's network.
        environment: Environments of the run, for the spaces; they may be closed.
        checkpoint: File of the agent.
        agent_steps: Agent steps of the run at the checkpoint.
        learner_updates: Updates of the learner at the checkpoint.
    """

    def __init__(
        self,
        config: Config,
        network: Network,
        environment: Environments,
        checkpoint: Path,
        agent_steps: int,
        learner_updates: int,
    ) -> None:
        self.config = config
        self.network = network.eval()
        self.checkpoint = checkpoint
        self.agent_steps = agent_steps
        self.learner_updates = learner_updates
        self._environment = environment
        self._space: spaces.Space[Any] = environment.vector.single_observation_space

    def __repr__(self) -> str:
        name, file = self.config.environment_name, str(self.checkpoint)
        return f"Agent({name!r}, agent_steps={self.agent_steps}, checkpoint={file!r})"

    def act(self, observation: Any, *, epsilon: float = 0.0, random: np.random.Generator | None = None) -> Any:
        """Returns the best action for an observation, or an array of actions for a batch of observations.

        Observations and actions have the types of the environment's spaces: a `Discrete` action is an `int`.
        With `config.stack` above 1 an observation is a stack of the last ones, the oldest first: [stack, ...], or
        [N, stack, ...] in a batch. Atari games return stacked observations.

        Args:
            observation: An observation of the environment, or the observations of the vector environment.
            epsilon: Probability of a random action instead of the best one.
            random: Source of the random actions; a fresh one by default.

        Raises:
            ValueError: The observation has another shape than the environment's space, or other keys.
        """
        spec = self._environment.spec
        stack = (spec.stack,) if self._environment.stacks else ()
        leading = _leading(self._space, observation)
        is_batch = len(leading) > len(stack)
        if leading[is_batch:] != stack:
            raise ValueError(
                f"an observation of {self._space} is {stack or 'one'} of them, or a batch, and this is one of {leading}"
            )
        frames = self._environment.frames(_flattened(self._space, observation))
        observations = spec.arrays if spec.parts else spec.arrays[0]
        shaped = map_leaves(lambda array, part: array.reshape(-1, *part.observed(spec.stack)), frames, observations)
        q = q_values(self.network, shaped)
        numbers = choose(q, np.full(len(q), epsilon), random or np.random.default_rng())
        actions = self._environment.numbered(numbers)
        if is_batch:
            return actions
        return actions[0].item() if np.ndim(actions[0]) == 0 else actions[0]


def load(run: str | PathLike[str], *, best: bool = False) -> Agent:
    """Reads the trained agent of a run.

    Args:
        run: The run's folder.
        best: Read the agent with the best evaluation instead of the newest checkpoint.

    Raises:
        RunFolderError: The folder has no run, or the run has no checkpoint, or none with an evaluation.
        UnavailableEnvironmentError: The run's environment cannot be made here.
    """
    try:
        return _load(RunFolder.open(Path(run)), best=best)
    except TrainingError as error:
        raise shortened(error) from error.__cause__


def _load(folder: RunFolder, *, best: bool) -> Agent:
    config, checkpoint = folder.config(), folder.best_agent() if best else folder.latest_checkpoint()
    environment = environments.make(config, 1)
    network = make_network(config, environment.spec)
    environment.close()
    load_network(network, "average.", checkpoint.tensors)
    state = checkpoint.state
    counts = state if best else {**state["meter"], "learner_updates": state["learner"]["updates"]}
    return Agent(config, network, environment, checkpoint.path, counts["agent_steps"], counts["learner_updates"])


def _leading(space: spaces.Space[Any], observation: Any, name: str = "the observation") -> tuple[int, ...]:
    """Leading dimensions of an observation, before the dimensions of its space.

    Raises:
        ValueError: The observation, or the part of this name, has another shape or other parts than its space.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        found = {_leading(inner, part, label) for label, inner, part in _parts(space, observation, name)}
        if len(found) > 1:
            raise ValueError(f"{name} has parts with batches of several shapes: {', '.join(map(str, sorted(found)))}")
        return found.pop()
    shape: tuple[int, ...] = np.shape(observation)
    own = space.shape or ()
    dimensions = len(shape) - len(own)
    if dimensions < 0 or shape[dimensions:] != own:
        raise ValueError(f"{name} has the shape {shape}: it must be {own}, or a batch of them")
    return shape[:dimensions]


def _parts(
    space: spaces.Dict | spaces.Tuple[Any], observation: Any, name: str
) -> list[tuple[str, spaces.Space[Any], Any]]:
    """Names, spaces and values of the parts of an observation."""
    if isinstance(space, spaces.Dict):
        is_mapping = isinstance(observation, Mapping)
        if not is_mapping or observation.keys() != space.spaces.keys():
            found = f"has the keys {list(observation)}" if is_mapping else f"is {type(observation).__name__}"
            raise ValueError(f"{name} {found}: it must be a dictionary with the keys {list(space.spaces)}")
        return [(f"{name}[{key!r}]", inner, observation[key]) for key, inner in space.spaces.items()]
    is_tuple = isinstance(observation, tuple | list)
    if not is_tuple or len(observation) != len(space.spaces):
        found = f"has {len(observation)} parts" if is_tuple else f"is {type(observation).__name__}"
        raise ValueError(f"{name} {found}: it must be a tuple of {len(space.spaces)}")
    pairs = zip(space.spaces, observation, strict=True)
    return [(f"{name}[{index}]", inner, part) for index, (inner, part) in enumerate(pairs)]


def _flattened(space: spaces.Space[Any], observation: Any) -> Any:
    """The observation with its leading dimensions as one."""
    if isinstance(space, spaces.Dict):
        return {key: _flattened(inner, observation[key]) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_flattened(inner, part) for inner, part in zip(space.spaces, observation, strict=True))
    return np.reshape(observation, (-1, *(space.shape or ())))
