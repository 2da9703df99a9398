"""The recorder, on environments whose observations name their episode and step."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pettingzoo  # type: ignore[import-untyped]
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from oracle import Row, Stream, n_step

import innet_drl as innet
from innet_drl import errors

VIEW = innet.NStep(n=1, gamma=0.9)


class Counter(gymnasium.Env[Any, Any]):
    """Observation: number of the environment, of its episode, and of the step. Odd episodes are truncated."""

    observation_space = gymnasium.spaces.Box(0, 1000, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(1000)

    def __init__(self, number: int = 0, length: int = 4) -> None:
        self.number, self.length, self.episode, self.t = number, length, -1, 0

    def _see(self) -> Any:
        return np.array([self.number, self.episode, self.t], np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = self.t == self.length + self.number
        return self._see(), float(action), over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


def spaces(env: Any) -> tuple[Any, Any]:
    single = hasattr(env, "num_envs")
    return (
        (env.single_observation_space, env.single_action_space) if single else (env.observation_space, env.action_space)
    )


def memory(env: Any) -> innet.Memory:
    return innet.Memory([innet.Table.from_spaces("t", *spaces(env), capacity=5000, view=VIEW)], seed=1)


def check(batch: innet.Batch, lengths: list[int]) -> None:
    """Checks that every transition is of one episode, and bootstraps unless the episode terminated."""
    assert batch.observation.dtype == np.float64
    np.testing.assert_array_equal(batch.next_observation, batch.observation + np.array([0, 0, 1]))
    number, episode, t = batch.observation.astype(int).T
    last = t + 1 == np.array(lengths)[number]
    np.testing.assert_array_equal(batch.discount == 0, last & (episode % 2 == 0))
    # All steps of an episode are there, the last ones too.
    for each, length in enumerate(lengths):
        assert set(t[(number == each) & (episode < 3)]) == set(range(length))
    assert (last & (episode % 2 == 1)).any()
    np.testing.assert_array_equal(batch.reward, batch.action)


class InPlace(Counter):
    """Returns one array, which every step overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.state = np.zeros(3)

    def _see(self) -> Any:
        self.state[:] = super()._see()
        return self.state


def vector(mode: AutoresetMode, *, copy: bool = True) -> SyncVectorEnv:
    made = [lambda: Counter(0), lambda: Counter(1), lambda: Counter(2)]
    return SyncVectorEnv(made, copy=copy, autoreset_mode=mode)


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vector_environments_are_recorded_in_both_autoreset_modes(mode: AutoresetMode, copy: bool) -> None:
    env = vector(mode, copy=copy)
    with memory(env) as replay:
        writer = replay.writer("t", 3, chunk_steps=5)
        with innet.Recorder(env, writer) as recorder:
            recorder.reset(seed=0)
            for step in range(60):
                recorder.step(np.full(3, step))
            assert recorder.single_action_space.n == 1000
            writer.flush()
            assert writer.dropped_windows == 0
        check(replay.sample("t", 2000), [4, 5, 6])


@pytest.mark.parametrize("env", [Counter(), vector(AutoresetMode.NEXT_STEP)])
def test_a_writer_for_another_number_of_environments_is_refused(env: Any) -> None:
    with memory(env) as replay:
        writer = replay.writer("t", 2)
        assert writer.num_envs == 2
        number = getattr(env, "num_envs", 1)
        with pytest.raises(errors.ConfigError, match=f"is for 2 environments, .*open it with num_envs={number}"):
            innet.Recorder(env, writer)


def test_a_view_without_a_place_for_last_observations_is_refused_before_the_first_episode() -> None:
    window = innet.Window(before=1, after=1)
    with memory(Counter()) as replay, replay.writer("t", 1, window) as writer:
        with pytest.raises(errors.ConfigError, match=r"view .* no place for the last observation .*Sequences or"):
            innet.Recorder(Counter(), writer)
    env = vector(AutoresetMode.NEXT_STEP)
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", env.num_envs, window)) as recorder:
        recorder.reset(seed=0)
        for _ in range(30):
            recorder.step(np.zeros(env.num_envs, np.int64))
        recorder.flush()
        assert len(replay.sample("t", 20, window)) == 20


class Parts(Counter):
    """A dictionary of parts."""

    observation_space = gymnasium.spaces.Dict(  # type: ignore[assignment]
        {"mode": gymnasium.spaces.Discrete(3), "place": gymnasium.spaces.Box(-1, 1, (2,), np.float32)}
    )

    def _see(self) -> Any:
        return {"mode": self.t % 3, "place": np.zeros(2, np.float32)}


@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_flattened_parts_become_float32_by_a_wrapper() -> None:
    flat = gymnasium.wrappers.FlattenObservation(Parts())
    assert flat.observation_space.dtype == np.float64
    env = gymnasium.wrappers.DtypeObservation(flat, np.float32)
    with memory(env) as replay:
        with innet.Recorder(env, replay.writer("t", 1)) as recorder:
            recorder.reset()
            for _ in range(3):
                recorder.step(0)
        batch = replay.sample("t", 4)
        assert batch.observation.dtype == np.float32
        assert batch.observation.shape == (4, 5)


@pytest.mark.parametrize("env", [Counter(), InPlace()])
def test_a_single_environment_is_recorded(env: Counter) -> None:
    with memory(env) as replay:
        writer = replay.writer("t", 1, VIEW)
        with innet.Recorder(env, writer) as recorder:
            with pytest.raises(errors.ConfigError, match="call `reset` before `step`"):
                recorder.step(1)
            for _ in range(5):
                _, info = recorder.reset()
                assert info == {}
                over, step = False, 0
                while not over:
                    _, _, terminated, truncated, _ = recorder.step(step)
                    over, step = terminated or truncated, step + 1
            # A reset in the middle of an episode: its steps were whole transitions already, but for the last.
            recorder.reset()
            recorder.step(0)
            recorder.step(1)
            recorder.reset()
            recorder.step(0)
        batch = replay.sample("t", 2000)
        assert not ((batch.observation[:, 1] == 5) & (batch.observation[:, 2] == 1)).any(), "nothing follows this step"
        check(batch, [4])


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, None])
def test_birth_priorities_bootstrap_from_the_last_observation(mode: AutoresetMode | None) -> None:
    env: Any = Counter(0) if mode is None else vector(mode)

    def q_values(observation: Any) -> Any:
        """Two actions: the greedy one is worth the number of the step; the other one is taken."""
        return np.stack([np.zeros(len(observation)), observation[:, 2]], 1).astype(np.float32)

    with memory(env) as replay:
        writer = replay.writer("t", 1 if mode is None else 3, VIEW)
        with innet.Recorder(env, writer, q_values) as recorder:
            observation, _ = recorder.reset()
            for _ in range(60):
                rows = np.asarray(observation) if mode else np.asarray(observation)[None]
                action = np.zeros(len(rows), np.int32)
                observation, _, terminated, truncated, _ = recorder.step(action if mode else 0, q=q_values(rows))
                if mode is None and (terminated or truncated):
                    observation, _ = recorder.reset()
        batch = replay.sample("t", 500, VIEW)
        # |0 + discount * max Q(next) - Q(taken)|, to the power of alpha; a terminated step has none.
        following = 0.9 * (batch.observation[:, 2] + 1)
        expected = np.where(batch.discount > 0, following, 0) ** 0.6
        mass = batch.probabilities * replay.stats()["tables"]["t"]["total_mass"]
        np.testing.assert_allclose(mass, expected, rtol=1e-4)


def test_a_truncation_without_a_q_function_says_what_is_missing() -> None:
    env = vector(AutoresetMode.SAME_STEP)
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", 3, VIEW)) as recorder:
        recorder.reset()
        with pytest.raises(errors.ConfigError, match="give the Recorder a `q_function`"):
            for _ in range(20):
                recorder.step(np.zeros(3, int), q=np.zeros((3, 2), np.float32))


def queue(env: Any) -> innet.Memory:
    """A memory that hands out each transition once, and takes no more than 20 before they are read."""
    table = innet.Table.from_spaces(
        "t",
        *spaces(env),
        capacity=5000,
        view=VIEW,
        sampler="fifo",
        min_size=1,
        max_times_sampled=1,
        samples_per_insert=1.0,
        slack=20.0,
    )
    return innet.Memory([table])


def read(replay: innet.Memory) -> list[tuple[int, ...]]:
    """Environment, episode, step and action of each transition that the queue has, or its writer."""
    try:
        batch = replay.sample("t", 100, timeout=0.0, allow_short=True)
    except errors.DeadlineError:
        return []
    return [(*map(int, now), int(action)) for now, action in zip(batch.observation, batch.action, strict=True)]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, None])
def test_a_step_that_was_not_appended_is_appended_by_the_next_call(mode: AutoresetMode | None) -> None:
    """Every step is made once, and written once with its own action."""
    env: Any = Counter() if mode is None else vector(mode)
    number = 1 if mode is None else 3
    written: list[tuple[int, ...]] = []
    expected: set[tuple[int, ...]] = set()
    late = 0
    with queue(env) as replay:
        with innet.Recorder(env, replay.writer("t", number, chunk_steps=1)) as recorder:
            observation, _ = recorder.reset()
            ended = np.zeros(number, bool)
            for step in range(100):
                action = step if mode is None else np.full(3, step)
                while True:
                    try:
                        following, _, terminated, truncated, _ = recorder.step(action, timeout=0.0)
                        break
                    except errors.DeadlineError:
                        late += 1
                        written += read(replay)
                rows = np.reshape(observation, (number, 3)).astype(int)
                # In NEXT_STEP, the step after an end is a reset.
                reset = ended if mode is AutoresetMode.NEXT_STEP else np.zeros(number, bool)
                expected |= {(*map(int, row), step) for row in rows[~reset]}
                then = np.reshape(following, (number, 3))
                observation, ended = following, np.reshape(np.logical_or(terminated, truncated), number)
                shown = ~reset & (~ended if mode is AutoresetMode.SAME_STEP else True)
                np.testing.assert_array_equal(then[shown], rows[shown] + [0, 0, 1])
                if mode is None and ended[0]:
                    observation, _ = recorder.reset()
            written += read(replay)
        written += read(replay)
    assert late > 2
    assert len(written) == len(set(written))
    assert set(written) <= expected
    # A last step that ends no episode has no next observation.
    assert len(written) >= len(expected) - number


def test_the_last_step_of_an_episode_is_appended_by_the_reset() -> None:
    env = Counter(length=1)
    written: list[tuple[int, ...]] = []
    late = 0
    with queue(env) as replay:
        with innet.Recorder(env, replay.writer("t", 1, chunk_steps=1)) as recorder:
            for episode in range(60):
                recorder.reset()
                try:
                    recorder.step(episode, timeout=0.0)
                except errors.DeadlineError:
                    late += 1
                    written += read(replay)
            written += read(replay)
        written += read(replay)
    assert late > 1
    assert [action for *_, action in written] == list(range(60))


def test_a_step_that_was_not_appended_is_appended_at_the_end() -> None:
    env = Counter(length=100)
    with queue(env) as replay, innet.Recorder(env, replay.writer("t", 1, chunk_steps=1)) as recorder:
        recorder.reset()
        step, late = 0, False
        while not late:
            try:
                recorder.step(step, timeout=0.0)
                step += 1
            except errors.DeadlineError:
                late = True
        written = read(replay)
        recorder.close()
        written += read(replay)
        assert [action for *_, action in written] == list(range(step))


def test_a_row_that_is_refused_asks_for_a_reset() -> None:
    env = Counter()
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", 1, VIEW)) as recorder:
        recorder.reset()
        recorder.step(1)
        with pytest.raises(errors.SchemaError, match="colour"):
            recorder.step(2, colour=np.zeros(1, np.float32))
        with pytest.raises(errors.ConfigError, match="the last step failed: call `reset`"):
            recorder.step(3)
        recorder.reset()
        for step in range(4):
            recorder.step(step)
        recorder.close()
        batch = replay.sample("t", 500)
        assert set(map(tuple, np.stack([batch.observation[:, 1], batch.action], 1))) == {(1, step) for step in range(4)}


@pytest.mark.parametrize("call", ["step", "reset"])
def test_an_environment_that_raises_asks_for_a_reset(call: str) -> None:
    """Whether it has stepped is unknown: its next result would be recorded after the observation before."""
    env: Any = Counter()
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", 1, VIEW)) as recorder:
        recorder.reset()
        recorder.step(1)
        right = getattr(env, call)

        def steps_and_raises(*arguments: Any, **keywords: Any) -> None:
            right(*arguments, **keywords)
            raise OSError("a broken wire")

        setattr(env, call, steps_and_raises)
        with pytest.raises(OSError, match="a broken wire"):
            recorder.step(2) if call == "step" else recorder.reset()
        setattr(env, call, right)
        with pytest.raises(errors.ConfigError, match="the last step failed: call `reset`"):
            recorder.step(3)
        recorder.reset()
        for step in range(4, 8):
            recorder.step(step)
        recorder.close()
        batch = replay.sample("t", 500)
        newest = batch.observation[:, 1] == env.episode
        assert set(batch.action[newest].tolist()) == {4, 5, 6, 7}
        np.testing.assert_array_equal(batch.next_observation, batch.observation + np.array([0, 0, 1]))


def test_a_recorder_is_closed_again_after_a_block_that_raised() -> None:
    env = Counter()
    with memory(env) as replay:
        with pytest.raises(OSError, match="broken"), innet.Recorder(env, replay.writer("t", 1, VIEW)) as recorder:
            recorder.reset()
            recorder.step(1)
            raise OSError("broken")
        recorder.close()


class TwoAgents(pettingzoo.ParallelEnv):  # type: ignore[misc]
    """The spaces of a PettingZoo environment are functions of the agent."""

    possible_agents: ClassVar = ["left", "right"]

    def action_space(self, agent: str) -> Any:
        return Counter.action_space


def test_an_environment_of_several_agents_is_refused() -> None:
    with memory(Counter()) as replay, replay.writer("t", 2, VIEW) as writer:
        with pytest.raises(errors.ConfigError, match=r"has several: open replay\.writer"):
            innet.Recorder(TwoAgents(), writer)
        with pytest.raises(errors.ConfigError, match="takes an environment of Gymnasium, and got 3"):
            innet.Recorder(3, writer)


def test_an_episode_without_its_last_observation_is_named() -> None:
    env = vector(AutoresetMode.SAME_STEP)
    step = env.step
    env.step = lambda actions: (*step(actions)[:4], {})  # type: ignore[method-assign]
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", 3, VIEW)) as recorder:
        recorder.reset()
        with pytest.raises(errors.ConfigError, match=r"SAME_STEP without info\['final_obs'\]: return"):
            for _ in range(20):
                recorder.step(np.zeros(3, int))
        with pytest.raises(errors.ConfigError, match="call `reset` before `step`"):
            recorder.step(np.zeros(3, int))


def test_a_vector_environment_that_does_not_reset_is_refused() -> None:
    env = vector(AutoresetMode.DISABLED)
    with memory(env) as replay, pytest.raises(errors.ConfigError, match="NEXT_STEP or SAME_STEP"):
        innet.Recorder(env, replay.writer("t", 3, VIEW))


def test_a_recorder_names_what_it_was_given_in_place_of_a_writer_or_an_environment() -> None:
    env: Any = Counter()
    gym: Any = Counter()
    with memory(env) as replay:
        wrong: Any = replay
        with pytest.raises(errors.ConfigError, match=r"Recorder\(env, writer\) takes a Writer"):
            innet.Recorder(env, wrong)
        env.reset = lambda: gym.reset()[0]
        with pytest.raises(errors.ConfigError, match=r"reset of the environment has to return \(observation, info\)"):
            innet.Recorder(env, replay.writer("t", 1, VIEW)).reset()
        gym.step = lambda action: (0, 0.0, False, {})
        recorder = innet.Recorder(gym, replay.writer("t", 1, VIEW))
        recorder.reset()
        with pytest.raises(errors.ConfigError, match=r"step of the environment has to return .* returned 4 values"):
            recorder.step(0)
        # The step is lost: the environment was stepped.
        with pytest.raises(errors.ConfigError, match="call `reset`"):
            recorder.step(0)


def test_a_recorder_is_flushed_and_closed_as_its_writer() -> None:
    env = Counter()
    with memory(env) as replay:
        with innet.Recorder(env, replay.writer("t", 1, VIEW)) as recorder:
            recorder.reset()
            for action in range(3):
                recorder.step(action)
            assert replay.stats()["tables"]["t"]["steps"] == 0
            recorder.flush(timeout=5)
            assert replay.stats()["tables"]["t"]["steps"] == 3
        with pytest.raises(errors.ClosedError):
            recorder.flush()
        other = innet.Recorder(env, replay.writer("t", 1, VIEW))
        other.close(timeout=5)


def test_settings_and_columns_are_those_of_a_table() -> None:
    box, actions = gymnasium.spaces.Box(0, 255, (84, 84), np.uint8), gymnasium.spaces.MultiDiscrete([3, 4])
    made = innet.Table.from_spaces(
        "t", box, actions, 1000, columns={"memory": ("float32", (16,))}, priority_exponent=0.7
    )
    columns: dict[str, Any] = {
        "observation": ("uint8", (84, 84)),
        "action": ("int64", (2,)),
        "reward": "float32",
        "memory": ("float32", (16,)),
    }
    assert made == innet.Table("t", columns, 1000, priority_exponent=0.7)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_table_of_a_vector_environments_batched_spaces_is_named(mode: AutoresetMode) -> None:
    env = vector(mode)
    batched = innet.Table.from_spaces("t", env.observation_space, env.action_space, capacity=1000, view=VIEW)
    with innet.Memory(batched) as replay, replay.writer("t", env.num_envs) as writer:
        recorder = innet.Recorder(env, writer)
        recorder.reset()
        with pytest.raises(
            errors.SchemaError, match=r"of .*single_observation_space and single_action_space of a vector"
        ):
            recorder.step(np.zeros(env.num_envs, np.int64))


def test_observations_of_another_dtype_than_their_space_name_the_wrapper() -> None:
    env = Counter()
    space = gymnasium.spaces.Box(0, 1000, (3,), np.float32)
    wrong = gymnasium.wrappers.TransformObservation(env, lambda seen: seen, space)
    with memory(wrong) as replay, replay.writer("t", 1) as writer:
        recorder = innet.Recorder(wrong, writer)
        recorder.reset()
        message = (
            r'got float64\[1, 3\]: convert it, \.astype\("float32"\), or wrap .* gymnasium\.wrappers\.DtypeObservation'
        )
        with pytest.raises(errors.SchemaError, match=message):
            recorder.step(1)


class Noted(Counter):
    """Notes its rows for the oracle."""

    def __init__(self, number: int, mode: AutoresetMode) -> None:
        super().__init__(number)
        self.mode, self.stream, self.begun = mode, Stream(), False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        rows = self.stream.rows
        ended = bool(rows) and (rows[-1].terminated or rows[-1].truncated)
        # A mask comes with options, and a reset by itself without. Of an episode that ended and is reset by a mask, the
        # mode NEXT_STEP records no last observation.
        if ended and (self.mode is AutoresetMode.SAME_STEP or options is None):
            rows.append(Row(self._see(), final=True))
        self.begun = True
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        before = self._see()
        following, reward, terminated, truncated, info = super().step(action)
        row = Row(before, int(action), reward, terminated, truncated, first=self.begun)
        self.stream.rows.append(row)
        self.begun = False
        return following, reward, terminated, truncated, info


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_a_reset_mask_cuts_off_the_episodes_of_the_mask_alone(mode: AutoresetMode) -> None:
    random = np.random.default_rng(5)
    made = [Noted(number, mode) for number in range(3)]
    env = SyncVectorEnv([lambda each=each: each for each in made], autoreset_mode=mode)  # type: ignore[misc]
    view = innet.NStep(stack=2, n=3, gamma=0.9, padding="zero")
    queue = {"sampler": "fifo", "min_size": 1, "max_times_sampled": 1}
    table = innet.Table.from_spaces("t", *spaces(env), capacity=5000, view=view, **queue)  # type: ignore[arg-type]
    with innet.Memory(table) as replay:
        with innet.Recorder(env, replay.writer("t", 3)) as recorder:
            recorder.reset(options={})
            for step in range(400):
                if random.random() < 0.3:
                    mask = random.random(3) < 0.4
                    mask[random.integers(3)] = True
                    recorder.reset(options={"reset_mask": mask})
                recorder.step(np.full(3, step))
        batch = replay.sample("t", 2000, allow_short=True, timeout=0)
    written = {
        (int(batch.observation[i, -1, 0]), int(batch.action[i])): (
            batch.observation[i].tolist(),
            batch.reward[i],
            batch.discount[i],
            batch.next_observation[i].tolist(),
        )
        for i in range(len(batch.ids))
    }
    expected = {}
    for number, each in enumerate(made):
        for anchor, row in enumerate(each.stream.rows):
            right = n_step(each.stream, anchor, stack=2, n=3, gamma=0.9, padding="zero")
            if right is not None:
                following = right.next_observation.tolist()
                reward, discount = np.float32(right.reward), np.float32(right.discount)
                expected[number, row.action] = right.observation.tolist(), reward, discount, following
    assert len(expected) > 300
    assert written.keys() == expected.keys()
    for item, (observation, reward, discount, following) in expected.items():
        assert written[item][0] == observation, item
        assert written[item][3] == following, item
        np.testing.assert_allclose(written[item][1:3], (reward, discount), rtol=1e-6)


def test_a_wrong_reset_mask_is_named_and_a_lost_step_wants_a_whole_reset() -> None:
    env = vector(AutoresetMode.NEXT_STEP)
    some = np.array([True, False, False])
    with memory(env) as replay, innet.Recorder(env, replay.writer("t", 3, VIEW)) as recorder:
        with pytest.raises(errors.ConfigError, match="no episode has begun"):
            recorder.reset(options={"reset_mask": some})
        recorder.reset()
        for wrong in (np.ones(2, bool), np.ones(3)):
            with pytest.raises(errors.ConfigError, match=r"reset_mask has to be an array of bool\[3\]"):
                recorder.reset(options={"reset_mask": wrong})
        with pytest.raises(errors.SchemaError, match="colour"):
            recorder.step(np.zeros(3, int), colour=np.zeros(3, np.float32))
        with pytest.raises(errors.ConfigError, match="without a `reset_mask`"):
            recorder.reset(options={"reset_mask": some})
        recorder.reset(options={"reset_mask": np.ones(3, bool)})
        recorder.step(np.zeros(3, int))
