"""NaN and infinities in steps: refused where learning would read them, unless the column allows them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

BAD = [np.nan, np.inf, -np.inf]
VIEW = innet.NStep(n=2)


def table(*, finite: bool = True, view: Any = VIEW, dtype: str = "float32") -> innet.Table:
    columns: dict[str, Any] = {
        "observation": innet.Column(dtype, (4, 5), finite=finite),
        "action": "int64",
        "reward": innet.Column("float32", finite=finite),
    }
    return innet.Table("t", columns, 1_000, view=view)


def step(t: int, dtype: str = "float32") -> dict[str, Any]:
    return {
        "observation": np.full((2, 4, 5), t, dtype),
        "action": [0, 1],
        "reward": np.full(2, t, np.float32),
        "terminated": np.full(2, t % 5 == 4),
        "truncated": False,
    }


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_step_that_is_not_finite_is_refused_and_the_writer_goes_on(make_replay: MakeReplay, dtype: str) -> None:
    replay = make_replay([table(dtype=dtype)])
    with replay.writer("t", 2) as writer:
        for t in range(10):
            for bad in BAD:
                broken = step(t, dtype)
                broken["observation"][1, 2, 3] = bad
                name = "NaN" if np.isnan(bad) else str(bad)
                with pytest.raises(
                    errors.SchemaError,
                    match=rf'"t" was refused: "observation" of stream 1 is {name} at \[2, 3\], .*finite=False',
                ) as raised:
                    writer.append(**broken)
                assert isinstance(raised.value, ValueError)
                broken = step(t, dtype)
                broken["reward"][0] = bad
                with pytest.raises(errors.SchemaError, match=rf'"reward" of stream 0 is {name}, .*finite=False'):
                    writer.append(**broken)
            writer.append(**step(t, dtype))
        assert (writer.steps, writer.dropped_windows) == (20, 0)
    batch = replay.sample("t", 200)
    assert np.isfinite(batch.observation).all()
    assert set(batch.observation[:, 0, 0].tolist()) == set(range(10))


def test_the_observation_is_named_before_its_q_values(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 2) as writer:
        broken = step(0) | {"q": np.full((2, 3), np.nan, np.float32)}
        broken["observation"][0, 0, 0] = np.nan
        with pytest.raises(errors.SchemaError, match='"observation" of stream 0 is NaN'):
            writer.append(**broken)
        last = step(0) | {"truncated": True, "q": np.zeros((2, 3), np.float32)}
        last |= {"final_observation": np.full((2, 4, 5), np.inf, np.float32), "final_q": broken["q"]}
        with pytest.raises(errors.SchemaError, match=r'"final_observation" of stream 0 is inf at \[0, 0\]'):
            writer.append(**last)


def test_a_column_that_allows_them_does_so_for_every_client(make_replay: MakeReplay) -> None:
    """The definition is the table's: writers need not know it."""
    replay = make_replay([table(finite=False)])
    column = replay.tables()["t"].columns["observation"]
    assert column == innet.Column("float32", (4, 5), finite=False)
    with replay.writer("t", 2) as writer:
        for t in range(10):
            broken = step(t)
            broken["observation"][:] = np.nan
            broken["reward"][:] = np.inf
            writer.append(**broken)
        # An initial priority cannot be infinite.
        with pytest.raises(errors.SchemaError, match=r"stream 0 has the reward inf, .* give priorities instead"):
            writer.append(**broken, q=np.zeros((2, 3), np.float32))
    batch = replay.sample("t", 8)
    assert np.isnan(batch.observation).all()
    assert np.isinf(batch.reward).all()
    with pytest.raises(errors.TableDiffersError, match=r"finite=False"):
        replay.create_table(table())


def test_the_views_of_writer_and_table_name_the_observation(make_replay: MakeReplay) -> None:
    replay = make_replay([table(view=None)])
    broken = step(0)
    broken["observation"][:] = np.nan
    with replay.writer("t", 2, innet.Window(0, 0)) as writer:
        writer.append(**broken)
    for view in (innet.NStep(), innet.Sequences(4)):
        with replay.writer("t", 2, view) as writer, pytest.raises(errors.SchemaError, match='"observation" of stream'):
            writer.append(**broken)
    replay.drop_table("t")
    replay.create_table(table())
    with (
        replay.writer("t", 2, innet.Window(1, 2)) as writer,
        pytest.raises(errors.SchemaError, match='"observation" of stream 0'),
    ):
        writer.append(**broken)


def test_a_column_shows_and_keeps_that_it_allows_them() -> None:
    column = innet.Column("float32", (4,), finite=False)
    assert repr(column) == 'Column("float32", shape=(4,), codec="none", finite=False)'
    assert not column.finite
    assert pickle.loads(pickle.dumps(column)) == column != innet.Column("float32", (4,))
    assert innet.Column("float32").finite


class Broken(gymnasium.Env[Any, Any]):
    """Observes its step; the observation after `broken` steps, of all episodes, is NaN. Episodes have three steps."""

    observation_space = spaces.Box(-1, 9, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, broken: int) -> None:
        self.left = broken

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.left -= 1
        return np.full(1, np.nan if self.left == 0 else self.t, np.float32), 1.0, False, self.t == 3, {}


def vector(mode: str) -> Callable[[int], Any]:
    def make(broken: int) -> Any:
        makers = [lambda: Broken(-1), lambda: Broken(broken)]
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])

    return make


@pytest.mark.parametrize(
    ("make", "broken", "message"),
    [
        (Broken, 4, '"observation" of stream 0 is NaN'),
        (Broken, 3, '"final_observation" of stream 0 is NaN'),
        (vector("NEXT_STEP"), 4, '"observation" of stream 1 is NaN'),
        (vector("NEXT_STEP"), 3, '"observation" of stream 1 is NaN'),
        (vector("SAME_STEP"), 4, '"observation" of stream 1 is NaN'),
        (vector("SAME_STEP"), 3, '"final_observation" of stream 1 is NaN'),
    ],
)
def test_a_recorder_refuses_the_step_and_continues_after_a_reset(
    make: Callable[[int], Any], broken: int, message: str
) -> None:
    env = make(broken)
    streams = getattr(env, "num_envs", 1)
    space = SimpleNamespace(dtype="float32", shape=(1,))
    action_space = SimpleNamespace(dtype="int64", shape=())
    view = innet.NStep(n=1)
    with innet.Memory(innet.Table.from_spaces("t", space, action_space, 1_000, view=view)) as replay:
        with innet.Recorder(env, replay.writer("t", streams)) as recorder:

            def play(steps: int) -> None:
                recorder.reset()
                for _ in range(steps):
                    _, _, terminated, truncated, _ = recorder.step(recorder.action_space.sample())
                    if streams == 1 and (terminated or truncated):
                        recorder.reset()

            with pytest.raises(errors.SchemaError, match=message):
                play(20)
            play(20)
            recorder.flush()
            batch = replay.sample("t", 200)
            assert np.isfinite(batch.observation).all()
            assert np.isfinite(batch.next_observation).all()
