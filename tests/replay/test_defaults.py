"""Arguments left out: the slack and `first` are derived, and calls wait for 60 seconds."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from steps import VIEW, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

SEQUENCES = innet.Sequences(length=4, burn_in=2, period=3, stack=2, observation="frame")


def test_a_ratio_alone_is_held_by_the_derived_slack(make_replay: MakeReplay) -> None:
    replay = make_replay([table(capacity=600, min_size=100, samples_per_insert=8.0)])
    # Beside min_size the table holds 500 more items.
    slack = 8.0 * 500
    with replay.writer("t", 1, VIEW, chunk_steps=10) as writer:
        for t in range(300):
            writer.append(**step(t, episode=1000))
    items = replay.stats()["tables"]["t"]["inserted_items"]
    sampled = 0
    with pytest.raises(errors.DeadlineError, match=rf"slack {slack:g}"):
        while True:
            sampled += len(replay.sample("t", 256, VIEW, timeout=0))
    assert 8.0 * (items - 100) + slack - 256 < sampled <= 8.0 * (items - 100) + slack


@pytest.mark.parametrize("view", [VIEW, SEQUENCES], ids=["n-step", "sequences"])
def test_first_is_derived_from_the_ends(view: innet.NStep | innet.Sequences, make_replay: MakeReplay) -> None:
    replay = make_replay([table(name, sampler="fifo", max_times_sampled=1) for name in ("derived", "given")])
    with replay.writer("derived", 2, view) as derived, replay.writer("given", 2, view) as given:
        first = np.ones(2, bool)
        for t in range(80):
            row = step(t, 2) | {"terminated": np.array([t % 10 == 9, t % 7 == 3])}
            row["truncated"] = np.array([t % 25 == 3, False])
            row["q"] = np.random.default_rng(t).normal(size=(2, 80)).astype(np.float32)
            given.append(**(row | {"first": first}))
            del row["first"]
            derived.append(**row)
            first = row["terminated"] | row["truncated"]
    stats = replay.stats()["tables"]
    assert stats["derived"]["inserted_items"] == stats["given"]["inserted_items"] > 20
    one, other = (replay.sample(name, stats[name]["inserted_items"], view).as_dict() for name in ("derived", "given"))
    assert one.keys() == other.keys()
    for name in one.keys() - {"ids", "ages"}:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


WAITING = {
    innet.Replay: "batches create_table drop_parameters drop_table empty_table episodes get_parameters parameters "
    "put_parameters sample stats table tables update_priorities writer",
    innet.Writer: "append extend close flush",
    innet.Recorder: "close flush step",
}


@pytest.mark.parametrize("owner", WAITING, ids=lambda owner: owner.__name__)
def test_calls_that_wait_have_a_timeout_of_60_seconds(owner: type[Any]) -> None:
    timeouts = {}
    for name, call in inspect.getmembers(owner, callable):
        if not name.startswith("_") and "timeout" in (parameters := inspect.signature(call).parameters):
            timeouts[name] = parameters["timeout"].default
    assert timeouts == dict.fromkeys(WAITING[owner].split(), 60.0)


def test_connecting_has_a_timeout_of_10_seconds() -> None:
    assert inspect.signature(innet.connect).parameters["timeout"].default == 10.0
