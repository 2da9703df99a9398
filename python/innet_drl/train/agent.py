"""A trained agent: read from the folder of a run, it chooses actions."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl.train import environments
from innet_drl.train.checkpoints import under
from innet_drl.train.config import Config
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.exploration import choose
from innet_drl.train.networks import QNetwork, make_network, q_values
from innet_drl.train.run_folder import RunFolder


class Agent:
    """A trained agent on the CPU. `load` reads one.

    Args:
        config: The run's settings.
        spec: Spec of the environment.
        network: The agent's network.
        checkpoint: The file that it was read from.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, network: QNetwork, checkpoint: Path) -> None:
        self.config = config
        self.spec = spec
        self.network = network.eval()
        self.checkpoint = checkpoint

    def act(
        self, observation: Any, *, epsilon: float = 0.0, random: np.random.Generator | None = None
    ) -> int | NDArray[np.int64]:
        """Returns the best action of one observation, or an array of actions [N] of N observations.

        Actions are those of the environment's action space.

        Args:
            observation: What the environment returns, [*shape], or a batch of it, [N, *shape]. For an Atari game it is
                the last `stack` frames in grey, uint8 [stack, 84, 84].
            epsilon: Probability of a random action in place of the best one.
            random: Source of the random actions; a fresh one by default.

        Raises:
            ValueError: The observation has another shape than the run's environment.
        """
        batch = np.asarray(observation, self.spec.frame_dtype)
        shape = self.spec.observation_shape
        is_batch = batch.ndim == len(shape) + 1
        if batch.shape[is_batch:] != shape:
            raise ValueError(f"the observation has the shape {batch.shape}: it must be {shape}, or a batch of them")
        if not is_batch:
            batch = batch[None]
        q = q_values(self.network, np.ascontiguousarray(batch))
        actions = choose(q, np.full(len(batch), epsilon), random or np.random.default_rng()) + self.spec.first_action
        return actions if is_batch else int(actions[0])


def load(run: str | PathLike[str], *, best: bool = False) -> Agent:
    """Reads the trained agent of a run.

    Args:
        run: The run's folder.
        best: Take the agent with the best evaluation; by default it is the one of the newest checkpoint.

    Raises:
        RunFolderError: The folder has no run, or the run has no checkpoint, or none with an evaluation.
        UnavailableEnvironmentError: The run's environment cannot be made here.
    """
    folder = RunFolder.open(Path(run))
    config, checkpoint = folder.config(), folder.best_agent() if best else folder.latest_checkpoint()
    probe = environments.make(config, 1)
    network = make_network(config, probe.spec)
    probe.close()
    network.load_state_dict(under("average.", checkpoint.tensors))
    return Agent(config, probe.spec, network, checkpoint.path)
