"""Gymnasium's `Sequence` and `Graph`, alone and in structures, recorded in every mode of a reset."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import innet_drl as innet
from innet_drl import errors

POINT = spaces.Box(-1, 1, (3,), np.float32)
GRAPH = spaces.Graph(node_space=spaces.Box(-1, 1, (2,), np.float32), edge_space=spaces.Discrete(5))
SPACES: dict[str, spaces.Space[Any]] = {
    "points": spaces.Sequence(POINT),
    "stacked": spaces.Sequence(POINT, stack=True),
    "numbers": spaces.Sequence(spaces.Discrete(9)),
    "graph": GRAPH,
    "nodes": spaces.Graph(node_space=spaces.Discrete(7), edge_space=None),
    "parts": spaces.Dict(seen=spaces.Sequence(POINT), map=GRAPH, place=spaces.Discrete(4)),
    "pair": spaces.Tuple((spaces.Sequence(spaces.Discrete(9)), GRAPH, spaces.Discrete(3))),
}


class Explorer(gymnasium.Env[Any, Any]):
    """Random observations of a space, each kept by its number, which is the reward of the step that acts on it."""

    action_space = spaces.Sequence(spaces.Discrete(5))

    def __init__(self, space: spaces.Space[Any], seed: int, seen: list[Any]) -> None:
        self.observation_space = space
        space.seed(seed)
        self.seen, self.random = seen, np.random.default_rng(seed)

    def _see(self) -> Any:
        self.number = len(self.seen)
        self.seen.append(self.observation_space.sample())
        return self.seen[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        number = self.number
        return self._see(), float(number), bool(self.random.random() < 0.2), False, {}


def expected(space: Any, value: Any, dtype: Any = None) -> Any:
    """An observation as batches have it."""
    if isinstance(space, spaces.Dict):
        return {name: expected(part, value[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(expected(part, value[index]) for index, part in enumerate(space.spaces))
    if isinstance(space, spaces.Graph):
        parts: dict[str, Any] = {"nodes": np.asarray(value.nodes)}
        if space.edge_space is not None:
            parts["edges"] = np.empty(0, np.int64) if value.edges is None else value.edges
        parts["edge_links"] = np.empty((0, 2), np.int32) if value.edge_links is None else value.edge_links
        return parts
    if isinstance(space, spaces.Sequence):
        inner: Any = space.feature_space
        return np.array(value, inner.dtype).reshape(-1, *inner.shape)
    return np.asarray(value)


def check(found: Any, wanted: Any, item: int) -> None:
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)
        for name in wanted:
            check(found[name], wanted[name], item)
    elif isinstance(wanted, tuple):
        for one, other in zip(found, wanted, strict=True):
            check(one, other, item)
    else:
        assert found[item].dtype == wanted.dtype
        np.testing.assert_array_equal(found[item], wanted)


@pytest.mark.parametrize("mode", ["single", "NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("name", list(SPACES))
def test_recorded_observations_come_back(name: str, mode: str) -> None:
    space = SPACES[name]
    envs = 1 if mode == "single" else 2
    # The numbers of the second environment's observations begin at 10,000.
    seen: list[list[Any]] = [[] for _ in range(envs)]
    makes = [lambda env=env: Explorer(space, env, seen[env]) for env in range(envs)]
    env: Any = makes[0]() if mode == "single" else SyncVectorEnv(makes, autoreset_mode=AutoresetMode[mode])
    columns = {"env": "int64"}
    table = innet.Table.from_spaces(
        "t", space, Explorer.action_space, 1000, columns=columns, sampler="uniform", view=innet.NStep()
    )
    actions = np.random.default_rng(1)
    taken = []
    with innet.Memory(table) as memory:
        with innet.Recorder(env, memory.writer("t", envs)) as recorder:
            recorder.reset()
            for _ in range(40):
                rows = [tuple(actions.integers(0, 5, actions.integers(4)).tolist()) for _ in range(envs)]
                _, reward, terminated, *_ = recorder.step(rows[0] if mode == "single" else tuple(rows), env=range(envs))
                taken.append((np.reshape(reward, envs), rows))
                if mode == "single" and terminated:
                    recorder.reset()
        batch = memory.sample("t", 100)
    by_reward = {(e, float(reward[e])): rows[e] for reward, rows in taken for e in range(envs)}
    for item, (row_env, number) in enumerate(zip(batch.env, batch.reward.astype(int), strict=True)):
        own = seen[row_env]
        check(batch.observation, expected(space, own[number]), item)
        # The observation after a termination in the last step never came in the mode NEXT_STEP.
        if batch.discount[item] > 0 or number + 2 < len(own):
            check(batch.next_observation, expected(space, own[number + 1]), item)
        if mode != "NEXT_STEP":
            assert tuple(batch.action[item]) == by_reward[row_env, float(number)]


def test_columns_of_a_graph() -> None:
    table = innet.Table.from_spaces("t", SPACES["parts"], spaces.Discrete(2), 10)
    shapes = {name: (str(column.dtype), column.shape) for name, column in table.columns.items()}
    assert shapes == {
        "observation/map/nodes": ("float32", (None, 2)),
        "observation/map/edges": ("int64", (None,)),
        "observation/map/edge_links": ("int32", (None, 2)),
        "observation/place": ("int64", ()),
        "observation/seen": ("float32", (None, 3)),
        "action": ("int64", ()),
        "reward": ("float32", ()),
    }


@pytest.mark.parametrize(
    "feature", [spaces.Dict(a=spaces.Discrete(2)), spaces.Sequence(spaces.Discrete(2)), spaces.Text(3), GRAPH]
)
def test_sequences_of_no_arrays_of_one_shape_are_refused(feature: Any) -> None:
    with pytest.raises(errors.ConfigError, match='the space of "observation" has a sequence of values of'):
        innet.Table.from_spaces("t", spaces.Sequence(feature), spaces.Discrete(2), 10)


def test_graphs_are_appended_as_they_are() -> None:
    table = innet.Table.from_spaces("t", GRAPH, spaces.Discrete(2), 1000, view=innet.Window(0, 0))
    GRAPH.seed(3)
    graphs = [[GRAPH.sample(num_nodes=nodes) for nodes in (1, 4)] for _ in range(3)]
    flags = np.zeros((3, 2), bool)
    rows: dict[str, Any] = {"action": flags.astype(np.int64), "reward": flags.astype(np.float32)}
    rows |= {"terminated": flags, "truncated": flags}
    with innet.Memory(table) as memory:
        with memory.writer("t", 2) as writer:
            writer.extend(observation=graphs, **rows)
            for step in range(3):
                writer.append(observation=tuple(graphs[step]), **{name: row[step] for name, row in rows.items()})
        episodes = [episode.observation for episode in memory.episodes("t")]
    for stream, observation in enumerate(episodes):
        for step in range(6):
            check(observation, expected(GRAPH, graphs[step % 3][stream]), step)
