"""One training in several processes: some collect with the newest policy, one trains."""

from __future__ import annotations

from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit

from innet_drl.errors import ConfigError
from innet_drl.sb3.buffer import InnetReplayBuffer


def collect(model: OffPolicyAlgorithm, steps: int, pull_period: int = 100, log_interval: int | None = 4) -> None:
    """Plays, and adds the steps to the server of the model's buffer.

    The model plays as in `learn`: random actions for `learning_starts` steps, then its exploration. Its policy is
    replaced by what `train` of another process publishes.

    Args:
        model: A model with an environment, and an `InnetReplayBuffer` with an address.
        steps: Steps of all environments of this process.
        pull_period: Calls of the environment's `step` between two looks for a newer policy.
        log_interval: Episodes between two lines of the model's logger.

    Raises:
        ConfigError: The buffer has no address, a `VecNormalize` is not frozen, or the published policy is of another
            network.
        innet_drl.ReplayError: The server does not answer, or takes no steps, for the buffer's timeout.
    """
    buffer, name = _served(model)
    _, callback = model._setup_learn(steps)
    assert model.env is not None, "`_setup_learn` has checked it"
    callback.on_training_start(locals(), globals())
    version, period = 0, TrainFreq(pull_period, TrainFrequencyUnit.STEP)
    while model.num_timesteps < steps:
        published = buffer.replay.get_parameters(name, version, buffer.timeout, device=model.device)
        if published is not None:
            version = published.version
            try:
                model.policy.load_state_dict(published.tensors)
            except RuntimeError as error:
                raise ConfigError(
                    "the published policy is of another network: collectors and learner make the model with the same "
                    f"policy and policy_kwargs; {error}"
                ) from None
        rollout = model.collect_rollouts(
            model.env,
            callback,
            period,
            buffer,
            action_noise=model.action_noise,
            learning_starts=model.learning_starts,
            log_interval=log_interval,
        )
        if not rollout.continue_training:
            break
    callback.on_training_end()
    buffer.flush()


def train(model: OffPolicyAlgorithm, updates: int, publish_period: int = 100) -> None:
    """Trains on what other processes collect, and publishes the policy for them. The environment is not played.

    Args:
        model: A model with an `InnetReplayBuffer` with an address. `train_freq` and `gradient_steps` say how many
            updates are as long as a step, for schedules and DQN's target network; the buffer's `samples_per_insert`
            holds them to the steps that come. The buffer's `min_size` takes the place of `learning_starts`.
        updates: Updates of the networks.
        publish_period: Updates between two publications.

    Raises:
        ConfigError: The buffer has no address, a `VecNormalize` is not frozen, or `train_freq` counts episodes.
        innet_drl.ReplayError: The server does not answer, or has no steps, for the buffer's timeout.
    """
    buffer, name = _served(model)
    model._setup_learn(updates)
    assert isinstance(model.train_freq, TrainFreq)
    if model.train_freq.unit != TrainFrequencyUnit.STEP:
        raise ConfigError("train_freq counts episodes, which this process does not play: give it a number of steps")
    steps = model.train_freq.frequency
    at_once = model.gradient_steps if model.gradient_steps > 0 else steps
    published = 0
    for done in range(0, updates, at_once):
        if done >= published:
            buffer.replay.put_parameters(name, model.policy.state_dict(), timeout=buffer.timeout)
            published += publish_period
            model.logger.dump(done)
        model._update_current_progress_remaining(done, updates)
        model.train(gradient_steps=min(at_once, updates - done), batch_size=model.batch_size)
        for _ in range(steps):
            # DQN copies its target network here.
            model._on_step()
    buffer.replay.put_parameters(name, model.policy.state_dict(), timeout=buffer.timeout)
    model.logger.dump(updates)


def _served(model: OffPolicyAlgorithm) -> tuple[InnetReplayBuffer, str]:
    """The buffer, and the name of the policy's parameters beside its table."""
    buffer = model.replay_buffer
    if not isinstance(buffer, InnetReplayBuffer) or not buffer.is_served:
        raise ConfigError(
            "processes share the steps by a server: make the model with replay_buffer_class=InnetReplayBuffer and "
            'replay_buffer_kwargs={"address": "innet://host:7710"}'
        )
    normalizer = model.get_vec_normalize_env()
    if normalizer is not None and normalizer.training:
        raise ConfigError(
            "each process would normalise by statistics of its own: save them after some play in one process, and give "
            "every process the loaded VecNormalize with training=False"
        )
    return buffer, f"{buffer.table.name}-policy"
