"""Views against the naive oracle over random episodes, in this process and through a server."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from oracle import Stream, n_step, sequence
from simulation import FRAME_SHAPE, Autoreset, Simulation

import innet_drl as innet
from conftest import MakeReplay

# The sockets differ below what the views see: one of them is enough.
pytestmark = pytest.mark.parametrize("make_replay", ["process", "unix"], indirect=True)

STREAMS = 3
STEPS = 400

Padding = Literal["zero", "repeat"]
Codec = Literal["lz4", "zstd", "none"]


def queue(codec: Codec = "lz4", **columns: Any) -> innet.Table:
    """A table that hands out every item once, with the anchor's place in two columns of its own."""
    definition = {
        "frame": innet.Column("uint8", FRAME_SHAPE, codec),
        "action": "int64",
        "reward": "float32",
        "stream": "int16",
        "step": "int32",
        **columns,
    }
    return innet.Table("t", definition, 10_000, sampler="fifo", max_times_sampled=1)


def places(simulation: Simulation) -> dict[str, Any]:
    """Stream and row of the next step of every stream, as the columns of `queue` want them."""
    rows = [len(stream.rows) for stream in simulation.recorded]
    return {"stream": np.arange(STREAMS, dtype=np.int16), "step": np.array(rows, np.int32)}


def write(replay: innet.Replay, view: Any, simulation: Simulation, chunk_steps: int) -> int:
    """Writes the simulation and returns the number of items."""
    with replay.writer("t", STREAMS, view, chunk_steps=chunk_steps) as writer:
        for _ in range(STEPS):
            place = places(simulation)
            writer.append(**simulation.step(), **place)
    cut = [
        sum(row.truncated and not stream.has(t + 1) for t, row in enumerate(stream.rows))
        for stream in simulation.recorded
    ]
    assert writer.dropped_windows == (0 if isinstance(view, innet.Window) else sum(cut))
    return writer.items


def drain(replay: innet.Replay, view: Any, items: int) -> list[innet.Batch]:
    """All items, in batches of several sizes."""
    batches: list[innet.Batch] = []
    left = items
    while left > 0:
        batch = replay.sample("t", min(left, 37), view, timeout=10, threads=2)
        batches.append(batch)
        left -= len(batch)
    with pytest.raises(innet.errors.DeadlineError, match="holds 0 items"):
        replay.sample("t", 1, view, timeout=0)
    return batches


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(
    ("stack", "n", "padding", "chunk_steps", "codec"),
    [
        (4, 3, "zero", 7, "lz4"),
        (4, 3, "repeat", 50, "lz4"),
        (1, 1, "zero", 1, "lz4"),
        (2, 5, "repeat", 3, "lz4"),
        (3, 1, "zero", 400, "lz4"),
        (4, 3, "zero", 50, "zstd"),
    ],
)
def test_n_step_transitions_equal_the_oracle(
    make_replay: MakeReplay, autoreset: Autoreset, stack: int, n: int, padding: Padding, chunk_steps: int, codec: Codec
) -> None:
    view = innet.NStep(stack=stack, n=n, gamma=0.9, padding=padding, observation="frame")
    simulation = Simulation(STREAMS, seed=stack * 100 + n, autoreset=autoreset)
    replay = make_replay([queue(codec)])
    items = write(replay, view, simulation, chunk_steps)
    seen: set[tuple[int, int]] = set()
    for batch in drain(replay, view, items):
        for i in range(len(batch)):
            stream, step = int(batch.stream[i]), int(batch.step[i])
            assert (stream, step) not in seen
            seen.add((stream, step))
            expected = n_step(simulation.recorded[stream], step, stack=stack, n=n, gamma=0.9, padding=padding)
            assert expected is not None
            np.testing.assert_array_equal(batch.observation[i], expected.observation)
            assert batch.action[i] == expected.action
            assert batch.reward[i] == pytest.approx(expected.reward, rel=1e-5, abs=1e-6)
            assert batch.discount[i] == pytest.approx(expected.discount)
            np.testing.assert_array_equal(batch.next_observation[i], expected.next_observation)
    assert seen == {
        (number, t)
        for number, stream in enumerate(simulation.recorded)
        for t in range(len(stream.rows))
        if n_step(stream, t, stack=stack, n=n, gamma=0.9, padding=padding) is not None
    }
    assert covers_every_case(simulation.recorded, autoreset)


def covers_every_case(recorded: list[Stream], autoreset: Autoreset) -> bool:
    """Whether the episodes had ends with and without final rows, and lives lost within an episode."""
    rows = [row for stream in recorded for row in stream.rows]
    followed = [(row, after) for stream in recorded for row, after in zip(stream.rows, stream.rows[1:], strict=False)]
    return (
        any(row.truncated for row in rows)
        and any(row.final for row in rows)
        and any(row.terminated and after.final for row, after in followed)
        and any(row.terminated and not after.final and not after.first for row, after in followed)
        and any(row.truncated and after.first for row, after in followed) == (autoreset == "same_step")
        and any(row.terminated and after.first for row, after in followed) == (autoreset == "same_step")
    )


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
@pytest.mark.parametrize(
    ("length", "burn_in", "period", "stack", "padding"),
    [(5, 3, 4, 2, "zero"), (8, 0, 8, 1, "zero"), (4, 2, 1, 3, "repeat")],
)
def test_sequences_equal_the_oracle(
    make_replay: MakeReplay,
    autoreset: Autoreset,
    length: int,
    burn_in: int,
    period: int,
    stack: int,
    padding: Padding,
) -> None:
    view = innet.Sequences(
        length,
        burn_in,
        period,
        stack,
        observation="frame",
        padding=padding,
        gamma=0.9,
        state=("stream", "step", "memory"),
    )
    simulation = Simulation(STREAMS, seed=length, autoreset=autoreset, end_probability=0.05)
    replay = make_replay([queue(memory=("float32", 2))])
    with replay.writer("t", STREAMS, view, chunk_steps=9) as writer:
        for _ in range(STEPS):
            place = places(simulation)
            memory = np.stack([place["step"], -place["step"]], axis=1).astype(np.float32)
            writer.append(**simulation.step(), **place, memory=memory)
    items = writer.items
    seen: set[tuple[int, int]] = set()
    for batch in drain(replay, view, items):
        for i in range(len(batch)):
            stream, step = int(batch.stream[i]), int(batch.step[i])
            seen.add((stream, step))
            expected = sequence(
                simulation.recorded[stream],
                step,
                length=length,
                burn_in=burn_in,
                stack=stack,
                gamma=0.9,
                padding=padding,
            )
            assert expected is not None
            steps = expected.steps
            assert batch.mask[i].tolist() == [t < steps for t in range(burn_in + length)]
            known, shown = steps + 1, len(expected.action)
            np.testing.assert_array_equal(batch.observation[i, :known], expected.observation)
            np.testing.assert_array_equal(batch.action[i, :shown], expected.action)
            np.testing.assert_array_equal(batch.reward[i, :shown], np.array(expected.reward, np.float32))
            np.testing.assert_allclose(batch.discount[i, :shown], expected.discount)
            np.testing.assert_array_equal(batch.terminated[i, :shown], expected.terminated)
            np.testing.assert_array_equal(batch.truncated[i, :shown], expected.truncated)
            np.testing.assert_array_equal(batch.memory[i], [step, -step])
            for name in ("action", "reward", "discount", "terminated", "truncated", "first"):
                assert not getattr(batch, name)[i, shown:].any()
            # In the padding older frames of a stack may still be real ones; the newest is not.
            padding_frames = batch.observation[i, known:]
            assert not (padding_frames[:, -1] if stack > 1 else padding_frames).any()
    assert seen == {
        (number, t)
        for number, stream in enumerate(simulation.recorded)
        for t in stream.sequence_starts(period)
        if sequence(stream, t, length=length, burn_in=burn_in, stack=stack, gamma=0.9, padding=padding) is not None
    }


def test_raw_windows_equal_the_rows(make_replay: MakeReplay) -> None:
    view = innet.Window(2, 3)
    simulation = Simulation(STREAMS, seed=5, autoreset="next_step")
    replay = make_replay([queue()])
    items = write(replay, view, simulation, 11)
    assert items > 0
    for batch in drain(replay, view, items):
        for i in range(len(batch)):
            stream, step = int(batch.stream[i, 2]), int(batch.step[i, 2])
            rows = simulation.recorded[stream].rows
            assert batch.mask[i, 2]
            end = next((k for k in range(3) if rows[step + k].terminated or rows[step + k].truncated), 3)
            # With the observation after an end, where it came.
            known = end < 3 and simulation.recorded[stream].has(step + end + 1)
            assert batch.mask[i, 2:].sum() == end + 1 + known
            for slot in np.flatnonzero(batch.mask[i]):
                row = rows[step + slot - 2]
                np.testing.assert_array_equal(batch.frame[i, slot], row.observation)
                assert batch.final[i, slot] == row.final
                assert batch.first[i, slot] == row.first
                assert batch.terminated[i, slot] == row.terminated
                assert batch.truncated[i, slot] == row.truncated
                if not row.final:
                    assert batch.action[i, slot] == row.action
            assert not batch.frame[i][~batch.mask[i]].any()


def test_a_narrower_view_reads_wider_items(make_replay: MakeReplay) -> None:
    replay = make_replay([queue()])
    simulation = Simulation(STREAMS, seed=6, autoreset="next_step")
    wide = innet.NStep(stack=4, n=3, gamma=0.9, observation="frame")
    narrow = innet.NStep(stack=2, n=1, gamma=0.9, observation="frame")
    items = write(replay, wide, simulation, 20)
    with pytest.raises(innet.errors.ViewError, match="before"):
        replay.sample("t", 1, innet.NStep(stack=5, n=3, observation="frame"), timeout=1)
    for batch in drain(replay, narrow, items):
        for i in range(len(batch)):
            stream = simulation.recorded[batch.stream[i]]
            expected = n_step(stream, int(batch.step[i]), stack=2, n=1, gamma=0.9, padding="zero")
            assert expected is not None
            np.testing.assert_array_equal(batch.observation[i], expected.observation)
            assert batch.discount[i] == pytest.approx(expected.discount)


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_priorities_at_birth_are_the_n_step_errors(make_replay: MakeReplay, autoreset: Autoreset) -> None:
    """The learner's formula on the actor's own Q-values: |R + discount max Q(s') - Q(s, a)|."""
    view = innet.NStep(stack=1, n=3, gamma=0.9, observation="frame")
    simulation = Simulation(STREAMS, seed=8, autoreset=autoreset)
    rng = np.random.default_rng(8)
    replay = make_replay([innet.Table("t", queue().columns, 10_000, priority_exponent=1.0)])
    # Q-values by stream and row, as the actor has them in hand.
    known: list[list[np.ndarray[Any, np.dtype[np.float32]]]] = [[] for _ in range(STREAMS)]
    with replay.writer("t", STREAMS, view) as writer:
        for _ in range(40):
            place = places(simulation)
            arguments = simulation.step()
            q, final_q = rng.normal(size=(2, STREAMS, 6)).astype(np.float32)
            if autoreset == "same_step":
                arguments["final_q"] = final_q
            for i, stream in enumerate(simulation.recorded):
                known[i].append(q[i])
                if stream.rows[-1].final and autoreset == "same_step":
                    known[i].append(final_q[i])
            writer.append(**arguments, **place, q=q)
    errors: dict[tuple[int, int], float] = {}
    for number, stream in enumerate(simulation.recorded):
        for t in range(len(stream.rows)):
            expected = n_step(stream, t, stack=1, n=3, gamma=0.9, padding="zero")
            if expected is None:
                continue
            bootstrap = 0.0 if expected.discount == 0 else known[number][t + expected.steps].max()
            target = expected.reward + expected.discount * bootstrap
            errors[number, t] = abs(target - known[number][t][expected.action])
    batch = replay.sample("t", 300, view, timeout=5)
    total = sum(errors.values())
    for i in range(len(batch)):
        share = errors[int(batch.stream[i]), int(batch.step[i])] / total
        assert batch.probabilities[i] == pytest.approx(share, rel=1e-3, abs=1e-6)
