"""Structures of arrays: their leaves, paths and parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from innet_drl import errors, structures

OBSERVATION: dict[str, Any] = {
    "camera": np.arange(6).reshape(2, 3),
    "arm": (np.array([1, 2]), {"on": np.array([True, False])}),
}


def test_leaves_are_mapped_with_those_in_their_place_in_others() -> None:
    doubled = structures.map_leaves(lambda one, other: one + other, OBSERVATION, OBSERVATION)
    np.testing.assert_array_equal(doubled["camera"], 2 * OBSERVATION["camera"])
    assert isinstance(doubled["arm"], tuple)
    assert doubled["arm"][0].tolist() == [2, 4]
    # Keys that the first structure lacks are left out; parts that the others lack are an error.
    assert structures.map_leaves(lambda one, other: other, {"a": 1}, {"a": 2, "b": 3}) == {"a": 2}
    with pytest.raises(KeyError):
        structures.map_leaves(lambda one, other: other, {"a": 1}, {})
    with pytest.raises(ValueError, match="shorter"):
        structures.map_leaves(lambda one, other: other, (1, 2), (1,))
    assert structures.map_leaves(np.ndim, np.zeros((2, 2))) == 2


def test_an_index_applies_to_each_leaf() -> None:
    first = structures.at_index(OBSERVATION, 0)
    assert first["camera"].tolist() == [0, 1, 2]
    assert (first["arm"][0], first["arm"][1]["on"]) == (1, True)
    assert structures.at_index(OBSERVATION, slice(1))["arm"][0].tolist() == [1]


def test_paths_lead_to_the_leaves_and_back() -> None:
    paths = structures.flatten({"observation": OBSERVATION})
    assert list(paths) == ["observation/camera", "observation/arm/0", "observation/arm/1/on"]
    again = structures.unflatten(paths)["observation"]
    assert isinstance(again["arm"], tuple)
    assert again["arm"][1]["on"] is OBSERVATION["arm"][1]["on"]
    assert structures.unflatten({"a/0": 1, "a/1": 2}, tuples=False) == {"a": {"0": 1, "1": 2}}
    assert structures.unflatten({"a/0": 1, "a/2": 2}) == {"a": {"0": 1, "2": 2}}


def test_a_name_that_is_no_part_of_a_column_s_is_refused() -> None:
    structures.check_part("camera_0", "the space")
    for name in ("", "a/b", "7", 7, None):
        with pytest.raises(
            errors.ConfigError, match=f"^the space has a part {name!r}: a part's name is a text without"
        ):
            structures.check_part(name, "the space")
