"""Environments by import path and function: arguments, wrappers, vector environments, autoreset modes, and faults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import brought
import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from training import small

from innet_drl import cli, train
from innet_drl.launch import start
from innet_drl.torch_batches import TorchBatch, to_device
from innet_drl.train import environments
from innet_drl.train.environments import Environments
from innet_drl.train.errors import ActorError, ConfigurationError, UnavailableEnvironmentError
from innet_drl.train.flags import parse_train
from innet_drl.train.learn.learner import Learner
from innet_drl.train.memory import EmbeddedMemory, make_view, memory_settings
from innet_drl.train.play.actor import Actor


def made(environment: Any, **changes: Any) -> Environments:
    return environments.make(small(environment=environment, **changes), 2)


def reward_of(envs: Environments) -> float:
    envs.reset(0)
    return float(envs.step(np.zeros(2, np.int64)).reward[0])


def test_arguments_and_wrappers_are_flags() -> None:
    flags = ["--environment", "brought:Counter", "--environment-args", "images=true"]
    wrappers = ["--environment-wrappers", "brought:Doubled", "brought:Shifted"]
    config = parse_train([*flags, *wrappers]).config
    envs = environments.make(config, 2)
    assert envs.spec.frame_shape == (4, 4)
    # The first wrapper is the innermost one.
    assert reward_of(envs) == 2.0 * 1.0 + 1.0


def test_wrappers_around_an_id() -> None:
    assert reward_of(made("CartPole-v1", environment_wrappers=(brought.Shifted, "brought:Doubled"))) == 4.0


@pytest.mark.parametrize("setting", ["environment_args", "environment_wrappers"])
def test_games_by_rom_take_neither(setting: str) -> None:
    value: Any = {"mode": 1} if setting == "environment_args" else ("brought:Doubled",)
    with pytest.raises(UnavailableEnvironmentError, match="ALE/Breakout-v5"):
        made("atari/breakout", stack=4, **{setting: value})


def played(config: Any, steps: int) -> tuple[Environments, TorchBatch, NDArray[np.float64], Learner]:
    """All transitions of an actor, their priorities at birth, and the learner with the actor's network."""
    import torch

    envs = environments.make(config, config.environments)
    torch.manual_seed(0)
    learner = Learner(config, envs.spec)
    settings = memory_settings(config, envs.spec, "t", learner.parameters())
    with EmbeddedMemory.unserved(settings) as memory:
        writer = memory.writer(0)
        actor = Actor(config, 0, envs, learner.network, writer)
        for _ in range(steps):
            actor.step()
        assert actor.report().games, "no episode has ended"
        writer.close()
        assert getattr(writer, "dropped_windows", 0) == 0
        batch = memory.replay.sample("t", 1_000, make_view(config, envs.spec))
        at_birth = batch.probabilities * memory.replay.stats()["tables"]["t"]["total_mass"]
        return envs, to_device(batch, torch.device("cpu")), at_birth, learner


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_truncated_games_bootstrap_from_their_last_observation(mode: str, stack: int, images: bool) -> None:
    """Games count 1, 2, ... 6: the last transition leads to the observation of 6, which no reset replaces."""
    arguments = {"mode": mode, "images": images}
    config = small(
        environment=brought.make_vector,
        environment_args=arguments,
        serial=True,
        stack=stack,
        n_step=1,
        channels=(2, 2, 2),
    )
    _, batch, _, _ = played(config, 60)
    frames = [
        getattr(batch, name).numpy().reshape(len(batch), stack, -1)[:, :, 0]
        for name in ("observation", "next_observation")
    ]
    expected = {
        tuple(tuple(max(0, last - back) for back in reversed(range(stack))) for last in (count, count + 1))
        for count in range(1, 6)
    }
    found = {(tuple(map(int, now)), tuple(map(int, then))) for now, then in zip(*frames, strict=True)}
    assert found == expected
    assert (batch.discount > 0).all()


@pytest.mark.parametrize("loss", ["double_q", "categorical", "quantile", "own_networks:squared"])
@pytest.mark.parametrize("munchausen", [False, True])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_a_priority_at_birth_is_the_learners(mode: str, munchausen: bool, loss: str) -> None:
    config = small(
        environment=brought.make_vector,
        environment_args={"mode": mode, "observation": "dictionary"},
        serial=True,
        priority_exponent=1.0,
        loss=loss,
        munchausen=munchausen,
        quantiles=7,
        atoms=11,
        channels=(2, 2, 2),
    )
    _, batch, at_birth, learner = played(config, 60)
    np.testing.assert_allclose(at_birth, learner.update(batch).td_error.numpy(), atol=1e-5)
    assert (batch.discount == 0).any()
    assert at_birth.std() > 0.01


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_an_observation_is_no_buffer_of_the_environment(mode: str, images: bool) -> None:
    """The actor holds an observation over the next step, for which this environment uses the array again."""
    envs = made(brought.make_vector, environment_args={"mode": mode, "images": images, "copy": False})
    held = envs.reset(0)
    before = held.copy()
    for _ in range(12):
        step = envs.step(np.zeros(2, np.int64))
        np.testing.assert_array_equal(held, before)
        held, before = step.observation, step.observation.copy()


@pytest.mark.parametrize(
    ("mode", "lost"),
    [("SAME_STEP", [True, False, True, False]), ("NEXT_STEP", [True, True, False, True, False, False])],
)
def test_lives_of_the_next_game_are_not_those_of_the_last(mode: str, lost: list[bool]) -> None:
    """A truncated game of 3 lives, then a game of 2: in NEXT_STEP each is followed by a step that resets it."""
    envs = made(brought.make_vector, environment_args={"mode": mode, "lives": True})
    envs.reset(0)
    found = [envs.step(np.zeros(2, np.int64)).life_lost.tolist() for _ in range(2 * len(lost))]
    assert found == [[each, each] for each in 2 * lost]


def test_a_vector_environment_of_ones_own_needs_its_last_observations() -> None:
    envs = made(brought.make_vector)
    step = envs.vector.step

    def forget(actions: Any) -> Any:
        *results, _ = step(actions)
        return *results, {}

    envs.vector.step = forget
    envs.reset(0)
    with pytest.raises(UnavailableEnvironmentError, match=r"without info\['final_obs'\]"):
        for _ in range(10):
            envs.step(np.zeros(2, np.int64))


def test_last_observations_may_be_one_array() -> None:
    """ale-py has one array of all environments, where Gymnasium has an array of objects."""
    # First: ale-py keeps the mode of its newest environment in the class's metadata.
    spec = environments.make(small(environment="atari/breakout", stack=4), 1).spec
    atari = AtariVectorEnv("breakout", 2, max_num_frames_per_episode=200, autoreset_mode=AutoresetMode.SAME_STEP)
    envs = Environments(atari, spec)
    envs.reset(0)
    finals = [envs.step(np.zeros(2, np.int64)).final_observation for _ in range(60)]
    ended = [final for final in finals if final is not None]
    assert ended
    assert ended[0].shape == (2, 4, 84, 84)


@pytest.mark.slow
def test_training_in_processes_of_their_own(tmp_path: Path) -> None:
    """A function of this test, which no process could import."""

    def make(images: bool = False) -> gymnasium.Env[Any, Any]:
        return brought.Counter(images)

    config = small(
        environment=make, async_environments=True, environments=1, steps=300, batch_size=16, evaluation_games=1
    )
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None
    assert result.evaluation.mean == 5.0
    assert "<locals>.make" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_vector_environment_may_be_processes(tmp_path: Path) -> None:
    config = small(environment="brought:make_async", environments=2, steps=300, batch_size=16, evaluation_games=1)
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None


@pytest.mark.parametrize("serial", [False, True])
def test_environments_are_closed_at_the_end(serial: bool, tmp_path: Path) -> None:
    class Stop(train.Callback):
        def on_metrics(self, metrics: train.Metrics) -> None:
            if metrics["learner_updates"]:
                raise RuntimeError("enough")

    arguments = {"folder": str(tmp_path)}
    config = small(environment=brought.Noted, environment_args=arguments, serial=serial, steps=1_000_000)
    with pytest.raises(RuntimeError, match="enough"):
        start.train(config, tmp_path / "run", callbacks=[Stop()])
    assert list(tmp_path.glob("closed-*"))
    assert not list(tmp_path.glob("open-*"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("brought:make_raises", "'brought:make_raises' cannot be made: it raises RuntimeError: no licence"),
        ("brought:make_number", "environment brought:make_number: it returned int: return a gymnasium.Env"),
        ("brought:make_wrong_count", r"returned SyncVectorEnv of 3 for num_envs=2"),
        ("brought:missing", "brought has no 'missing'"),
        ("nothing_here:make", "there is no module 'nothing_here'"),
        ("unheard-of-v0", r"factories of your own module:factory"),
        ("brought.py:Counter", "there is no module 'brought.py': a path is module:name, with dots for folders"),
        ("./brought:Counter", "a path is module:name, with dots for folders"),
        ("brought.Counter", "factories of your own module:factory"),
        ("brought:Countr", r"did you mean Counter\?$"),
        ("brought", "factories of your own module:factory"),
    ],
)
def test_a_factory_that_cannot_be_used_is_one_error(environment: str, message: str) -> None:
    with pytest.raises((UnavailableEnvironmentError, ConfigurationError), match=message):
        made(environment)


def test_an_environment_that_changes_its_shapes_ends_the_run_at_once(tmp_path: Path) -> None:
    """No actor is replaced: a replacement would end in the same way."""
    for serial, error in ((True, UnavailableEnvironmentError), (False, ActorError)):
        config = small(environment="brought:Changing", serial=serial)
        with pytest.raises(error, match=r"environment brought:Changing: its observations changed their shape .*Box"):
            start.train(config, tmp_path / str(serial))


NOT_FINITE = r"environment 1 \(environment brought:make_not_finite\) returned "


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "an observation with NaN at step 5,"),
        # The last observation of the first game.
        ({"step": 7, "value": np.inf}, "an observation with an infinite value at step 7,"),
        ({"observation": "dictionary"}, "an observation with NaN in 'arm.position' at step 5,"),
        ({"observation": "dictionary", "step": 7}, "an observation with NaN in 'arm.position' at step 7,"),
        ({"returns": "reward"}, "the reward nan at step 5,"),
        ({"returns": "reward", "value": -np.inf}, "the reward -inf at step 5,"),
    ],
)
def test_nan_and_infinity_name_environment_and_step(
    mode: str, stack: int, arguments: dict[str, Any], message: str
) -> None:
    envs = made("brought:make_not_finite", stack=stack, environment_args={"mode": mode, **arguments})
    envs.reset(0)
    action = np.zeros(2, np.int64)
    for _ in range(arguments.get("step", 5) - 1):
        envs.step(action)
    with pytest.raises(UnavailableEnvironmentError) as raised:
        envs.step(action)
    assert re.match(NOT_FINITE + message, str(raised.value))


def test_a_first_observation_with_nan_is_named() -> None:
    def reset(**_: Any) -> Any:
        return np.full(5, np.nan), {}

    envs = made("brought:make_not_finite")
    envs.vector.envs[1].reset = reset
    with pytest.raises(UnavailableEnvironmentError, match="returned an observation with NaN at its reset"):
        envs.reset(0)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("returns", ["observation", "reward"])
def test_nan_in_training_names_the_actor(tmp_path: Path, returns: str, clips: bool) -> None:
    for serial, error in ((True, UnavailableEnvironmentError), (False, ActorError)):
        config = small(
            environment="brought:make_not_finite",
            environment_args={"returns": returns, "step": 40},
            clip_rewards=clips,
            serial=serial,
        )
        what = {"observation": "an observation with NaN", "reward": "the reward nan"}[returns]
        # The steps of five resets come on top.
        place = rf"environment 3 of actor 0 \(environment brought:make_not_finite\) returned {what} at step 45, "
        with pytest.raises(error, match=place):
            start.train(config, tmp_path / str(serial))


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("step", r"its step has to return \(observation, reward, terminated, truncated, info\)"),
        ("reset", r"its reset has to return \(observation, info\)"),
    ],
)
def test_an_environment_of_the_interface_before_gymnasium_is_named(tmp_path: Path, returns: str, message: str) -> None:
    config = small(environment="brought:Gym", environment_args={"returns": returns}, serial=True)
    with pytest.raises(UnavailableEnvironmentError, match=f"environment brought:Gym: {message}"):
        start.train(config, tmp_path / "run")


def test_a_reward_that_is_no_number_is_named() -> None:
    class Listed(brought.Counter):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, [reward], *rest

    envs = made(Listed)
    envs.reset(0)
    with pytest.raises(
        UnavailableEnvironmentError, match="Listed: its step has to return a number as reward, and True"
    ):
        envs.step(np.zeros(2, np.int64))


class Unpacking(brought.Counter):
    """Its own code unpacks too few values at a step."""

    def __init__(self, steps: int = 30, text: str = "") -> None:
        super().__init__()
        self.steps_left, self.text = steps, text

    def step(self, action: Any) -> Any:
        self.steps_left -= 1
        if self.steps_left <= 0:
            if self.text:
                raise ValueError(self.text)
            _, _ = list(range(1))
        return super().step(action)


@pytest.mark.parametrize(
    ("text", "is_async"),
    [
        ("", False),
        ("", True),
        ("setting an array element with a sequence", False),
        ("all input arrays must have one shape", False),
    ],
)
def test_an_environments_own_error_is_not_taken_for_gymnasiums(
    is_async: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its errors are warnings, which tests raise.
    monkeypatch.setattr(gymnasium.logger, "min_level", gymnasium.logger.ERROR + 1)
    envs = made(Unpacking, environment_args={"text": text}, async_environments=is_async)
    envs.reset(0)
    with pytest.raises(ValueError, match=text or "not enough values to unpack") as raised:
        for _ in range(100):
            envs.step(np.zeros(2, np.int64))
    assert len(raised.value.__notes__) == 1
    envs.close()


def test_an_environments_own_error_restarts_its_actor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ActorError, match="no restart is left after 2 failures"):
        start.train(small(environment="test_own_environments:Unpacking", actor_restarts=1), tmp_path / "run")
    (first,) = [text for text in caplog.messages if "failed and is replaced" in text]
    assert "Traceback" in first
    assert "_, _ = list(range(1))" in first


class Doomed(brought.Counter):
    """Notes the seed of its game, and raises at its third step."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def reset(self, *, seed: int | None = None, **_: Any) -> Any:
        with open(self.file, "a") as file:
            print(seed, file=file)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise ValueError("doomed")
        return super().step(action)


def test_an_actor_that_died_before_its_first_report_is_replaced_with_other_seeds(tmp_path: Path) -> None:
    config = small(
        environment=Doomed, environment_args={"file": str(tmp_path / "seeds")}, environments=1, actor_restarts=2
    )
    with pytest.raises(ActorError, match="after 3 failures"):
        start.train(config, tmp_path / "run")
    seeds = [line for line in (tmp_path / "seeds").read_text().splitlines() if line != "None"]
    assert len(set(seeds)) == len(seeds) == 3


class Seedless(brought.Counter):
    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Nothing(brought.Counter):
    def step(self, action: Any) -> Any:
        return None


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_contract_is_named_where_gymnasium_found_it_broken(wrapped: bool) -> None:
    wrappers = ("gymnasium.wrappers:RecordEpisodeStatistics",) if wrapped else ()
    with pytest.raises(UnavailableEnvironmentError, match=r"it has to take reset\(seed=..., options=...\), as"):
        made(Seedless, environment_wrappers=wrappers).reset(0)
    envs = made(Nothing, environment_wrappers=wrappers)
    envs.reset(0)
    with pytest.raises(UnavailableEnvironmentError, match=r"its step has to return \(observation, reward"):
        envs.step(np.zeros(2, np.int64))


class Arguments(brought.Counter):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        if size > 1:
            self.reset(speed=1)  # type: ignore[call-arg]


def test_arguments_of_an_environment_are_told_from_those_of_its_own_calls() -> None:
    with pytest.raises(UnavailableEnvironmentError, match="'length'; its arguments are environment_args"):
        made(Arguments, environment_args={"length": 3})
    with pytest.raises(UnavailableEnvironmentError, match=r"unexpected keyword argument 'speed'$"):
        made(Arguments, environment_args={"size": 3})


class Stuck(brought.Counter):
    def reset(self, **_: Any) -> Any:
        raise OSError("the motor is off")


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize(
    ("environment", "last", "trace"),
    [
        ("Stuck", "its reset raises OSError: the motor is off", 'raise OSError("the motor is off")'),
        ("Nothing", "its step has to return (observation,", "cannot unpack non-iterable NoneType object"),
    ],
)
def test_the_terminal_has_the_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], environment: str, last: str, trace: str, serial: bool
) -> None:
    flags = ["--environment", f"test_own_environments:{environment}", "--minutes", "1", "--out", str(tmp_path / "run")]
    assert cli.main(["train", *flags, *(["--serial"] if serial else [])]) == 1
    printed = capfd.readouterr().err
    assert f"environment test_own_environments:{environment}: {last}" in printed
    assert trace in printed[printed.index("Traceback") :]


class Shapeless(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """A vector environment that returns other shapes than it declares."""

    def __init__(self, num_envs: int) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = brought.BOX
        self.single_action_space = brought.ACTIONS["discrete"]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((self.num_envs, 4)), {}


def test_a_vector_environment_of_other_shapes_than_it_declares_is_refused() -> None:
    with pytest.raises(UnavailableEnvironmentError, match=r"Shapeless: it returned .* shape \(4,\).* says \(3,\)"):
        made(Shapeless).reset(0)


class Scaled(Shapeless):
    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.full((self.num_envs, 8, 8), 0.5, np.float32), {}


def test_pixels_that_would_become_zeros_are_refused() -> None:
    with pytest.raises(
        UnavailableEnvironmentError, match=r"Scaled: it returned observations of float32, .* says uint8"
    ):
        made(Scaled).reset(0)


def test_an_error_of_a_step_names_the_environment() -> None:
    def fails(self: Any, action: Any) -> Any:
        raise ZeroDivisionError

    envs = made(brought.Counter)
    envs.vector.envs[0].step = fails.__get__(envs.vector.envs[0])
    envs.reset(0)
    with pytest.raises(ZeroDivisionError) as raised:
        envs.step(np.zeros(2, np.int64))
    assert raised.value.__notes__ == ["the step of the environment brought:Counter raised this"]


def test_an_actors_error_is_shown_once_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = small(environment="brought:Failing", actor_restarts=2)
    with pytest.raises(ActorError) as raised:
        start.train(config, tmp_path / "run")
    first, second = [
        record.getMessage() for record in caplog.records if "failed and is replaced" in record.getMessage()
    ]
    what = r"ValueError: the motor \d+ is stuck; the step of the environment brought:Failing raised this"
    assert re.match(rf"actor 0 failed and is replaced \(1 restarts left\): {what}\nTraceback", first)
    assert "brought.py" in first
    assert re.fullmatch(rf"actor 0 failed and is replaced \(0 restarts left\): {what}", second)
    last = rf"actor 0 failed, and no restart is left after 3 failures of actors in 10 minutes: {what}"
    assert re.fullmatch(last, str(raised.value))


def test_an_actors_only_error_has_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ActorError, match=r"no restart is left: ValueError: the motor .* is stuck.*\nTraceback"):
        start.train(small(environment="brought:Failing", actor_restarts=0), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stack_of_wrappers_trains_in_actors(tmp_path: Path, is_async: bool) -> None:
    """The time is added to the observation; then rewards are doubled, observations stacked, rewards shifted."""
    wrappers = ["gymnasium.wrappers:TimeAwareObservation", "brought:Doubled", "brought:Stacked", "brought:Shifted"]
    config = small(
        environment="CartPole-v1", environment_wrappers=wrappers, async_environments=is_async, environments=2, steps=400
    )
    result = train.run(config, folder=tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None
    # Each step gives 2 * 1 + 1.
    assert all(score % 3 == 0 and score > 15 for score in result.evaluation.scores)
    action = train.load(tmp_path / "run").act(np.zeros((2, 5)))
    assert action in (0, 1)


def test_a_video_of_an_environment_of_ones_own(tmp_path: Path) -> None:
    from innet_drl.train.networks import make_network
    from innet_drl.train.play import video

    config = small(environment=brought.Drawn)
    network = make_network(config, environments.make(config, 1).spec)
    assert video.record(config, network, tmp_path / "game.mp4") == 5.0
