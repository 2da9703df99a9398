"""One training in several processes: some collect with the newest policy, one trains."""

from __future__ import annotations

import math

from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback, TrainFreq, TrainFrequencyUnit

from innet_drl.errors import ConfigError
from innet_drl.sb3.buffer import InnetReplayBuffer


def collect(
    model: OffPolicyAlgorithm,
    steps: int,
    pull_period: int = 100,
    log_interval: int | None = 4,
    callback: MaybeCallback = None,
) -> None:
    """Plays, and adds the steps to the server of the model's buffer.

    The model plays as in `learn`: random actions for `learning_starts` steps, then its exploration. Its policy is
    replaced by what `train` of another process publishes. A further call begins new episodes, and goes on otherwise, as
    `learn(reset_num_timesteps=False)`.

    Args:
        model: A model with an environment, and an `InnetReplayBuffer` with an address.
        steps: Steps of all environments of this process, rounded up to a multiple of their number.
        pull_period: Calls of the environment's `step` between two looks for a newer policy.
        log_interval: Episodes between two lines of the model's logger.
        callback: As of `learn`.

    Raises:
        ConfigError: The buffer has no address, a `VecNormalize` is not frozen, or the published policy is of another
            network.
        innet_drl.ReplayError: The server does not answer, or takes no steps, for the buffer's timeout.
    """
    buffer, name = _served(model)
    # The environment is reset: the last call may have ended between a step and its storing.
    model._last_obs = None
    total, callback = model._setup_learn(steps, callback, reset_num_timesteps=model.num_timesteps == 0)
    assert model.env is not None, "`_setup_learn` has checked it"
    callback.on_training_start(locals(), globals())
    version = 0
    while model.num_timesteps < total:
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
        calls = math.ceil((total - model.num_timesteps) / model.n_envs)
        rollout = model.collect_rollouts(
            model.env,
            callback,
            TrainFreq(min(pull_period, calls), TrainFrequencyUnit.STEP),
            buffer,
            action_noise=model.action_noise,
            learning_starts=model.learning_starts,
            log_interval=log_interval,
        )
        if not rollout.continue_training:
            break
    callback.on_training_end()
    buffer.flush()


def train(
    model: OffPolicyAlgorithm,
    updates: int,
    publish_period: int = 100,
    callback: MaybeCallback = None,
    total_updates: int | None = None,
) -> None:
    """Trains on what other processes collect, and publishes the policy for them. The environment is not played.

    The model's `num_timesteps` are the steps of all collectors, counted with each publication. A further call, also of
    a model that was saved and loaded, goes on.

    Args:
        model: A model with an `InnetReplayBuffer` with an address. `train_freq` and `gradient_steps` say how many
            updates are as long as a step, for callbacks and DQN's target network; the buffer's `samples_per_insert`
            holds them to the steps that come. The buffer's `min_size` takes the place of `learning_starts`.
        updates: Updates of the networks.
        publish_period: Updates between two publications.
        callback: As of `learn`, called once for each step that the updates are as long as; `locals` has no values of
            an environment.
        total_updates: Updates, of all calls together, over which the schedules of learning rate and beta run; `None`
            ends them with this call.

    Raises:
        ConfigError: The buffer has no address, a `VecNormalize` is not frozen, `train_freq` counts episodes, or the
            model has more than `total_updates` after this call.
        innet_drl.ReplayError: The server does not answer, or has no steps, for the buffer's timeout.
    """
    buffer, name = _served(model)
    before = model._n_updates
    total = before + updates if total_updates is None else total_updates
    if total < before + updates:
        raise ConfigError(f"total_updates is {total}, and the model has {before + updates} after this call")
    _, callback = model._setup_learn(updates, callback, reset_num_timesteps=before == 0)
    assert isinstance(model.train_freq, TrainFreq)
    if model.train_freq.unit != TrainFrequencyUnit.STEP:
        raise ConfigError("train_freq counts episodes, which this process does not play: give it a number of steps")
    steps = model.train_freq.frequency
    at_once = model.gradient_steps if model.gradient_steps > 0 else steps

    def publish() -> None:
        buffer.replay.put_parameters(name, model.policy.state_dict(), timeout=buffer.timeout)
        table = buffer.replay.stats(buffer.timeout)["tables"].get(buffer.table.name, {})
        model.num_timesteps = table.get("inserted_items", model.num_timesteps)

    publish()
    model._num_timesteps_at_start = model.num_timesteps
    callback.on_training_start(locals(), globals())
    published, done, goes_on = 0, 0, True
    while done < updates and goes_on:
        if done - published >= publish_period:
            publish()
            published = done
            model.dump_logs()
        model._update_current_progress_remaining(before + done, total)
        count = min(at_once, updates - done)
        model.train(gradient_steps=count, batch_size=model.batch_size)
        done += count
        callback.on_rollout_start()
        callback.update_locals(locals())
        for _ in range(steps):
            goes_on = goes_on and callback.on_step()
            # DQN copies its target network here.
            model._on_step()
        callback.on_rollout_end()
    publish()
    model.dump_logs()
    callback.on_training_end()


def _served(model: OffPolicyAlgorithm) -> tuple[InnetReplayBuffer, str]:
    """The buffer, and the name of the policy's parameters beside its table."""
    buffer = model.replay_buffer
    if not isinstance(buffer, InnetReplayBuffer) or buffer.address is None:
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
