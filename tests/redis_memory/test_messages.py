"""The messages of a run on a Redis: what comes out at the learner is what a replay memory would have made."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from training import small

import innet_drl as innet
from innet_drl.redis.messages import FrameFormat, MessageFormat, StackFormat, layout_of, views
from innet_drl.redis.store import parse_address
from innet_drl.train.environments import EnvironmentSpec, Part
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import MemorySettings, make_table, make_view, memory_settings
from innet_drl.train.settings.config import Config

STREAMS, ACTIONS = 4, 3
IMAGES = EnvironmentSpec(actions=ACTIONS, stack=3, frame_shape=(5, 6), frame_dtype="uint8", frames_per_step=1)
VECTORS = EnvironmentSpec(actions=ACTIONS, stack=1, frame_shape=(4,), frame_dtype="float32", frames_per_step=1)

# A serial run's tables keep no replay ratio.
CONFIG = small(serial=True, environments=STREAMS, n_step=3)
UNIFORM = dataclasses.replace(CONFIG, priority_exponent=0.0)
TRANSITIONS = 50
SAMPLED = 12_000
"""So many that none of the few hundred is missed where all have the same probability."""


def settings(config: Config, spec: EnvironmentSpec) -> MemorySettings:
    return memory_settings(config, spec, "own", {})


def rows(spec: EnvironmentSpec, count: int = 200) -> list[dict[str, Any]]:
    """Games that end, lose lives and are truncated, as NEXT_STEP environments show them."""
    random = np.random.default_rng(0)
    first, final = np.ones(STREAMS, np.bool_), np.zeros(STREAMS, np.bool_)
    made = []
    for _ in range(count):
        fate = random.random(STREAMS)
        over = (fate < 0.05) & ~final
        truncated = (fate > 0.95) & ~final
        life = (fate > 0.45) & (fate < 0.5) & ~final
        made.append(
            {
                "frame": random.integers(0, 255, (STREAMS, *spec.frame_shape)).astype(spec.frame_dtype),
                "action": random.integers(0, ACTIONS, STREAMS).astype(np.uint8),
                "reward": random.normal(size=STREAMS).astype(np.float32),
                "terminated": over | life,
                "truncated": truncated,
                "first": first,
                "final": final,
                "q": random.normal(size=(STREAMS, ACTIONS)).astype(np.float32),
            }
        )
        first, final = final, over | truncated
    return made


def sent(messages: MessageFormat, played: list[dict[str, Any]], actor: int = 0) -> list[bytes]:
    """The messages of an actor."""
    builder, buffer = messages.builder(actor), bytearray(messages.layout.itemsize)
    arrays, done = views(messages.layout, buffer), []
    for row in played:
        builder.add(row)
        while builder.fill(arrays):
            done.append(bytes(buffer))
    return done


def received(messages: MessageFormat, sent: list[bytes]) -> dict[str, NDArray[Any]]:
    """Many transitions of the learner's replay after these messages, as the learner reads them."""
    with innet.Memory([messages.table], seed=1) as replay:
        reader = messages.reader(replay)
        for message in sent:
            for writer, row in reader.rows(views(messages.layout, message)):
                writer.append(**row)
                writer.flush()
        return messages.batch(replay.sample(messages.table.name, SAMPLED, messages.view).as_dict())


def transitions(arrays: dict[str, NDArray[Any]]) -> dict[bytes, float]:
    """Transitions as bytes, each with its probability; what a discount of 0 hides is left out."""
    told = {}
    for index in range(len(arrays["action"])):
        one = {name: arrays[name][index] for name in ("observation", "action", "reward", "discount")}
        one["reward"] = np.round(one["reward"], 4) + 0.0
        if one["discount"] > 0:
            one["next_observation"] = arrays["next_observation"][index]
        key = b"".join(np.asarray(value, np.float32).tobytes() for value in one.values())
        told[key] = float(arrays["probabilities"][index])
    return told


def straight(config: Config, spec: EnvironmentSpec, played: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """The same from a replay memory that an actor writes to itself."""
    with innet.Memory([make_table(config, spec, "own")], seed=1) as replay:
        with replay.writer("own", STREAMS, make_view(config, spec), chunk_steps=4) as writer:
            for row in played:
                writer.append(**row)
        return replay.sample("own", SAMPLED, make_view(config, spec)).as_dict()


@pytest.mark.parametrize("spec", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_stacks_are_the_transitions_of_the_memory(spec: EnvironmentSpec) -> None:
    played, messages = rows(spec), StackFormat(settings(UNIFORM, spec), TRANSITIONS)
    told = transitions(received(messages, sent(messages, played)))
    expected = transitions(straight(UNIFORM, spec, played))
    # What does not fill a message is not sent.
    assert len(told) == len(expected) // 50 * 50
    assert told.keys() <= expected.keys()


@pytest.mark.parametrize("spec", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_stacks_have_the_priorities_of_the_memory(spec: EnvironmentSpec) -> None:
    played, messages = rows(spec), StackFormat(settings(CONFIG, spec), TRANSITIONS)
    told = transitions(received(messages, sent(messages, played)))
    expected = transitions(straight(CONFIG, spec, played))
    ratios = [expected[key] / told[key] for key in told.keys() & expected.keys()]
    assert len(ratios) > 400
    np.testing.assert_allclose(ratios, np.mean(ratios), rtol=1e-3)


@pytest.mark.parametrize("spec", [IMAGES, VECTORS], ids=["images", "vectors"])
def test_frames_are_the_rows_of_the_memory(spec: EnvironmentSpec) -> None:
    played, messages = rows(spec, 13 * 15), FrameFormat(settings(CONFIG, spec), TRANSITIONS)
    assert messages.message_rows == 13
    told, expected = (
        transitions(received(messages, sent(messages, played))),
        transitions(straight(CONFIG, spec, played)),
    )
    common = told.keys() & expected.keys()
    assert len(common) > 400
    np.testing.assert_allclose([told[key] for key in common], [expected[key] for key in common], rtol=1e-6)


def test_actors_keep_to_their_own_streams() -> None:
    messages = FrameFormat(settings(UNIFORM, IMAGES), TRANSITIONS)
    one, other = rows(IMAGES, 13 * 4), rows(IMAGES, 13 * 8)[13 * 4 :]
    # The others begin somewhere in a game; these are theirs from the first.
    other[0] = {**other[0], "first": np.ones(STREAMS, np.bool_), "final": np.zeros(STREAMS, np.bool_)}
    turns = [each for pair in zip(sent(messages, one, 0), sent(messages, other, 1), strict=True) for each in pair]
    told = transitions(received(messages, turns))
    expected = [transitions(straight(UNIFORM, IMAGES, played)) for played in (one, other)]
    assert told.keys() == expected[0].keys() | expected[1].keys()


def test_the_papers_message_has_its_size() -> None:
    breakout = EnvironmentSpec(actions=4, stack=4, frame_shape=(84, 84), frame_dtype="uint8", frames_per_step=4)
    assert parse_address("redis://host:6379?message=stacks") == ("redis://host:6379", StackFormat, 200)
    layout = StackFormat(settings(small(environments=8), breakout)).layout
    assert layout.itemsize == 200 * (2 * 4 * 84 * 84 * 4 + 1 + 3 * 4)


def test_a_layout_places_arrays_one_after_the_other() -> None:
    layout = layout_of({"a": ("uint8", (3,)), "b": ("float32", (2, 2)), "c": ("int64", ())})
    assert layout.itemsize == 3 + 16 + 8
    arrays = views(layout, buffer := bytearray(layout.itemsize))
    arrays["b"][...] = 1.0
    arrays["c"][...] = -1
    assert buffer == bytes(3) + np.ones(4, np.float32).tobytes() + b"\xff" * 8


def test_stacks_of_dictionaries_are_refused_with_the_option_that_takes_them() -> None:
    part = Part("camera", (4, 4), "uint8", 255.0)
    spec = EnvironmentSpec(2, 1, (16,), "uint8", 1, parts=(part,))
    with pytest.raises(ConfigurationError, match=r"\?message=stacks: .* take \?message=frames"):
        StackFormat(settings(small(), spec))
