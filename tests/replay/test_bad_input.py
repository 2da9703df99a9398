"""Bad input to the replay: one clear error that says what to do, and nothing else breaks."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from calls import Lines
from places import HELPERS
from steps import VIEW, fill, step, still_works, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors, gradients

SPACE = SimpleNamespace(dtype="float32", shape=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"frame": np.zeros((1, 12, 8), np.float32)},
            r'"frame" has to be uint8\[1, 12, 8\].*got float32\[1, 12, 8\]',
        ),
        (
            {"frame": np.zeros((1, 8, 12), np.uint8)},
            r'"frame" has to be uint8\[1, 12, 8\].*got uint8\[1, 8, 12\]',
        ),
        ({"frame": np.zeros((2, 12, 8), np.uint8)}, r'"frame".*got uint8\[2, 12, 8\]'),
        ({"reward": np.zeros(1, np.float64)}, r'"reward" has to be float32\[1\].*got float64\[1\]'),
        ({"reward": np.complex64(1)}, r'"reward".*an array of complex64, which cannot be stored'),
        ({"action": [1.5]}, r'"action" has to be int64\[1\].*got float64\[1\]'),
        (
            {"action": 2**63},
            r'"action" has to be int64\[1\]: 9223372036854775808 has a number that int64 does not hold',
        ),
        ({"frame": 256}, r'"frame" has to be uint8\[1, 12, 8\]: 256 has a number that uint8 does not hold'),
        ({"reward": [1e39]}, r'"reward" has to be float32\[1\]: \[1\.e\+39\] has a number that float32 does not hold'),
        ({"action": ["left"]}, r'"action" has to be int64\[1\]: an array of <U4, which cannot be stored'),
        ({"frame": [[1], [2, 3]]}, r'"frame".*not an array: .*inhomogeneous'),
        ({"terminated": np.zeros(1, np.int8)}, r'"terminated" has to be bool\[1\].*got int8\[1\]'),
        ({"truncated": np.zeros(3, bool)}, r'"truncated" has to be bool\[1\].*got bool\[3\]'),
        ({"first": [0]}, r'"first" has to be bool\[1\].*got int64\[1\]'),
        ({"colour": 3}, r'no column "colour"; it has frame, action, reward'),
        ({"q": np.zeros((1, 4))}, r'"q" has to be float32\[1, 4\].*got float64\[1, 4\]'),
        ({"q": np.full((1, 4), np.nan, np.float32), "action": 1}, "q has to be finite"),
        ({"q": np.zeros((1, 4), np.float32), "action": 4}, "action 4 .*q has 4 actions"),
        ({"final_q": np.zeros((1, 4), np.float32)}, "final_q belongs to final observations"),
        (
            {
                "final_frame": np.zeros((1, 12, 8), np.uint8),
                "truncated": True,
                "q": np.zeros((1, 4), np.float32),
                "action": 1,
            },
            "is truncated, and its final observation has no Q-values: give final_q beside q",
        ),
        ({"final": True}, "final row, but the row before it neither terminated nor truncated"),
        ({"final_frame": np.zeros((1, 12, 8), np.uint8), "final": True}, "neither terminates nor truncates"),
        ({"priority": np.zeros(2)}, r'"priority" has to be numbers\[1\].*got float64\[2\]'),
    ],
)
def test_a_step_that_does_not_fit_is_refused(make_replay: MakeReplay, change: dict[str, Any], message: str) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 1, VIEW) as writer:
        with pytest.raises(errors.SchemaError, match=message):
            writer.append(**{**step(0), **change})
        assert writer.steps == 0
        for t in range(5):
            writer.append(**step(t))
    assert len(replay.sample("t", 2, VIEW, timeout=10)) == 2


def test_a_missing_column_is_named(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 1, VIEW) as writer:
        without = step(0)
        del without["action"]
        with pytest.raises(errors.SchemaError, match='column "action" is missing'):
            writer.append(**without)


def test_python_numbers_become_what_the_column_holds() -> None:
    with (
        innet.Memory([table()]) as replay,
        replay.writer("t", 2, innet.NStep(stack=1, n=1, observation="frame")) as writer,
    ):
        writer.append(frame=7, action=[1, 2], reward=0.1, terminated=True, truncated=False, first=[True, True])
        writer.flush()
        batch = replay.sample("t", 50, innet.NStep(stack=1, n=1, observation="frame"))
        assert (batch.observation == 7).all()
        assert set(batch.action.tolist()) == {1, 2}
        assert (batch.reward == np.float32(0.1)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_bad_priorities_change_nothing(make_replay: MakeReplay, bad: float) -> None:
    replay = make_replay([table(priority_exponent=1.0)])
    with (
        replay.writer("t", 1, VIEW) as writer,
        pytest.raises(errors.PriorityError, match="finite and not negative"),
    ):
        writer.append(**step(0, priority=np.array([bad])))
    fill(replay, 20, priority=1.0)
    batch = replay.sample("t", 8, VIEW, timeout=10)
    priorities = np.full(8, 5.0)
    priorities[6] = bad
    for wait in (True, False):
        with pytest.raises(errors.PriorityError, match="finite and not negative") as caught:
            replay.update_priorities("t", batch.ids, priorities, wait=wait)
        assert str(caught.value).startswith(f"priority 6 of 8 is {bad:g}: ")
    assert isinstance(caught.value, ValueError)
    np.testing.assert_allclose(replay.sample("t", 30, VIEW, timeout=10).probabilities, 1 / 20, rtol=1e-3)


def test_a_bad_priority_of_a_step_is_named_as_it_was_given(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 3, VIEW) as writer:
        for bad, words in ((np.nan, "nan: a priority"), (1e300, "1e300: a new item's priority is a float32")):
            with pytest.raises(errors.PriorityError, match=f"^priority 2 of 3 is {words}"):
                writer.append(**step(0, 3, priority=np.array([1.0, 2.0, bad])))
        assert writer.steps == 0


def test_a_priority_beyond_float32_is_cut_by_an_update(make_replay: MakeReplay) -> None:
    """With an exponent above 1 its power is beyond float64, too."""
    replay = make_replay([table(priority_exponent=4.0)])
    fill(replay, 20, priority=1.0)
    ids = replay.sample("t", 4, VIEW, timeout=10).ids
    assert replay.update_priorities("t", ids, np.full(4, 1e300)).applied == 4
    assert set(replay.sample("t", 64, VIEW, timeout=10).ids) <= set(ids)


def test_keys_and_priorities_have_to_be_pairs_of_numbers(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 20)
    key = replay.sample("t", 4, VIEW, timeout=10).ids
    with pytest.raises(errors.ConfigError, match="ids has one dimension of uint64 or int64, got float64"):
        replay.update_priorities("t", key.astype(float), np.ones(4))
    with pytest.raises(errors.ConfigError, match=r"got int32\[4\]: ids have 64 bits, which JAX cuts to 32; give the"):
        replay.update_priorities("t", key.astype(np.int32), np.ones(4))
    with pytest.raises(errors.ConfigError, match="priorities has one dimension"):
        replay.update_priorities("t", key, np.ones((4, 1)))
    with pytest.raises(errors.SchemaError, match="4 ids and 3 priorities"):
        replay.update_priorities("t", key, np.ones(3))
    for integers in (np.int32, np.uint8, np.int64):
        assert replay.update_priorities("t", key, np.ones(4, integers)).stale == 0
    assert replay.update_priorities("t", [], []) == replay.update_priorities("t", key[:0], np.ones(0))
    assert replay.update_priorities("t", key, np.ones(4, np.float16)).stale == 0


def test_a_bad_beta_is_refused_before_the_wait(make_replay: MakeReplay) -> None:
    """The table is empty, and no timeout is given."""
    replay = make_replay([table()])
    for beta in (-1.0, np.nan, 40.0):
        with pytest.raises(errors.ConfigError, match="beta is 0 to 4, got "):
            replay.sample("t", 4, VIEW, beta=beta)
        with pytest.raises(errors.ConfigError, match="beta is 0 to 4, got "):
            next(replay.batches("t", 4, VIEW, beta=beta))
    assert still_works(replay)


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (partial(innet.Table, "t", {"a": "uint8"}, 10), "sample_per_insert"),
        (partial(innet.Table.from_spaces, "t", SPACE, SPACE, 10), "priority_exponents"),
        (innet.NStep, "gama"),
        (partial(innet.Sequences, 8), "burnin"),
        (partial(innet.SumTree, 8), "priority_exponents"),
        (partial(innet.SumTree, 8), "alpha"),
        (innet.Memory, "max_byte"),
        (lambda **wrong: innet.Memory().serve("innet://127.0.0.1:0", **wrong), "io_thread"),
        (lambda **wrong: innet.Memory().writer("t", 1, **wrong), "chunk_step"),
        (lambda **wrong: innet.Memory().sample("t", 1, **wrong), "time_out"),
        (lambda **wrong: innet.Memory().batches("t", 1, **wrong), "normalise"),
        (lambda **wrong: innet.Memory().join_gradients("j", 0, 2, **wrong), "dead_line"),
        (lambda **wrong: innet.Memory().follow_gradients("j", 0, 2, values=1, threshold=1, **wrong), "stalenes"),
        (partial(innet.connect, "innet://127.0.0.1:1"), "tokens"),
        (partial(gradients.Station, "net_memif0", "10.0.0.3:7711"), "gate_way"),
    ],
)
def test_a_misspelt_argument_is_named(call: Any, wrong: str) -> None:
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{wrong}'"):
        call(**{wrong: 8})


def test_usual_mistakes_with_priorities_are_named(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table()])
    fill(replay, 20)
    ids = replay.sample("t", 8, VIEW, timeout=10).ids
    with pytest.raises(errors.PriorityError, match=r"^priority 0 of 8 is -1: .*; take the absolute value of TD errors"):
        replay.update_priorities("t", ids, -np.ones(8))
    with pytest.raises(errors.ConfigError, match=r"got float64\[8, 1\]: flatten it, priorities\.flatten\(\)"):
        replay.update_priorities("t", ids, np.ones((8, 1)))
    with pytest.raises(errors.ConfigError, match=r"got float64\[4, 2\]$"):
        replay.update_priorities("t", ids, np.ones((4, 2)))
    with pytest.raises(errors.ConfigError, match=r"one dimension of numbers, got float64\[\]: give an array or a list"):
        replay.update_priorities("t", ids, 1.0)
    replay.empty_table("t")
    assert replay.update_priorities("t", ids, np.ones(8)).stale == 8
    for _ in range(2):
        assert replay.update_priorities("t", np.arange(8), np.ones(8)).stale == 8
    (line,) = (line for line in log.lines if "update_priorities" in line)
    assert line.endswith("its 8 ids look like positions in a buffer; use batch.ids")


def test_ids_of_another_table_are_stale(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table(), table("other")])
    fill(replay, 20)
    ids = replay.sample("t", 8, VIEW, timeout=10).ids
    assert replay.update_priorities("other", ids, np.ones(8)).stale == 8
    assert replay.update_priorities("t", ids, np.ones(8)).applied == 8


@pytest.mark.parametrize("name", ["terminated", "first", "final_q", "priority", "timeout", "weights", "ids"])
def test_a_column_with_the_name_of_an_argument_is_refused(make_replay: MakeReplay, name: str) -> None:
    with pytest.raises(errors.TableError, match=rf'column "{name}" has the name of an argument.*rename it'):
        make_replay([innet.Table("t", {name: "float32"}, 100)])


def test_numpy_scalars_pass_where_numbers_do(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 1, VIEW) as writer:
        for t in range(20):
            given = step(t, reward=np.float64(0.5), action=np.int32(3), priority=np.float32(1))
            writer.append(**{**given, "terminated": np.bool_(False), "first": np.array(t == 0)})
    batch = replay.sample("t", 4, VIEW, timeout=10)
    assert (batch.action == 3).all()
    np.testing.assert_allclose(batch.reward, 0.5 * (1 + 0.9 + 0.81))


def test_a_batch_cannot_be_written(make_replay: MakeReplay) -> None:
    """`observation` and `next_observation` share their frames."""
    replay = make_replay([table()])
    fill(replay, 20)
    batch = replay.sample("t", 4, VIEW, timeout=10)
    with pytest.raises(ValueError, match="read-only"):
        batch.observation[0] = 0
    copy = batch.observation.copy()
    copy[0] = 0


def test_steps_that_make_no_item_are_named_while_a_sample_waits(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with replay.writer("t", 1, VIEW) as writer:
        for t in range(200):
            writer.append(**step(t, first=True, terminated=False))
        writer.flush()
        assert writer.dropped_windows == 199
        with pytest.raises(
            errors.DeadlineError, match=r"200 steps have arrived and made no item: .*first=True"
        ) as raised:
            replay.sample("t", 1, VIEW, timeout=0)
        assert "(199 windows were dropped: a row with first=True follows no end of an episode" in str(raised.value)


def test_episodes_within_the_burn_in_are_named_while_a_sample_waits(make_replay: MakeReplay) -> None:
    view = innet.Sequences(8, burn_in=12, observation="frame")
    replay = make_replay([table()])
    with replay.writer("t", 1, view) as writer:
        for t in range(240):
            writer.append(**step(t, episode=12))
        with pytest.raises(errors.DeadlineError, match=r"no episode longer than the burn_in") as raised:
            replay.sample("t", 1, view, timeout=0)
        # Sequences begin every 8 steps.
        assert "(all 40 windows ended within their burn_in: an item needs a longer episode" in str(raised.value)
        assert writer.dropped_windows == 0


def test_dropped_windows_are_named_where_others_are_not(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=30)])
    with replay.writer("t", 1, VIEW, chunk_steps=1) as writer:
        for t in range(20):
            writer.append(**step(t, episode=1000))
        for t in range(15):
            writer.append(**step(t, first=True, terminated=False))
        writer.flush()
        dropped = writer.dropped_windows
        assert dropped > 0
        with pytest.raises(errors.DeadlineError, match=rf"waiting for writers \({dropped} windows were dropped: "):
            replay.sample("t", 1, VIEW, timeout=0)


def test_an_unknown_table_is_named_with_those_there_are(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    for use in (
        lambda: replay.table("apex"),
        lambda: replay.writer("apex", 1, VIEW),
        lambda: replay.sample("apex", 1, VIEW),
        lambda: replay.batches("apex", 1, VIEW),
        lambda: replay.update_priorities("apex", [1], [1.0]),
        lambda: replay.empty_table("apex"),
        lambda: replay.drop_table("apex"),
    ):
        with pytest.raises(errors.UnknownTableError, match=r'no table "apex"; .*\bt\b'):
            use()
    assert still_works(replay)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity is 1 to 16777216 steps, got 0"),
        ({"capacity": 2**24 + 1}, "capacity is 1 to"),
        ({"columns": {}}, "1 to 256 columns"),
        ({"columns": {"a": ("uint8", (4, 0))}}, "empty shape"),
        ({"priority_exponent": -1.0}, "priority_exponent is 0 to 4"),
        ({"samples_per_insert": 8.0, "slack": 1.0}, "slack 1 is too small"),
        (
            {"samples_per_insert": 2.0, "slack": 64.0, "max_times_sampled": 1},
            "samples_per_insert 2 is more than max_times_sampled 1",
        ),
        ({"name": ""}, "a name has 1 to 128 bytes"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.TableError, match=message):
        innet.Table(**{"name": "t", "columns": {"a": "uint8"}, "capacity": 10, **arguments})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: innet.Column("complex64"), "dtype is bool, an integer or a float.*complex64"),
        (lambda: innet.Column(">f4"), "byte order"),
        (lambda: innet.Column("uint8", -1), "shape is a tuple of positive integers, .* got -1"),
        (lambda: innet.Column("uint8", (), cast(Any, "gzip")), 'codec is "lz4" or "zstd" or "none", got .gzip'),
        (lambda: table(sampler=cast(Any, "newest")), 'sampler is "prioritized" or "uniform" or "fifo" .*got .newest'),
        (lambda: innet.NStep(stack=0), "stack is 1 to 1024, got 0"),
        (lambda: innet.NStep(n=2000), "n is 1 to 1024, got 2000"),
        (lambda: innet.NStep(gamma=1.5), "gamma is 0 to 1, got 1.5"),
        (lambda: innet.NStep(padding=cast(Any, "edge")), 'padding is "zero" or "repeat"'),
        (lambda: innet.Sequences(0), "length is 1 to"),
        (lambda: innet.Window(0, 65535), "after is 0 to"),
    ],
)
def test_definitions_that_cannot_be_used_say_why(make: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        make()


def test_a_view_that_the_table_cannot_serve_is_refused(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    with pytest.raises(errors.SchemaError, match=r'reads column "pixels", the table has frame, action, reward: name'):
        replay.writer("t", 1, innet.NStep(observation="pixels"))
    with pytest.raises(TypeError, match="a view is an NStep, Sequences, a Trajectory or a Window, got str"):
        replay.sample("t", 1, "nstep")  # type: ignore[call-overload]
    fill(replay, 20, view=innet.NStep(stack=2, n=1, observation="frame"))
    with pytest.raises(errors.ViewError, match=r"needs 3 steps before and 3 after.*written with 1 and 1"):
        replay.sample("t", 1, VIEW, timeout=10)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda replay: replay.writer("t", 0, VIEW), errors.ConfigError, "num_envs is 1 or more, got 0"),
        (lambda replay: replay.sample("t", 0, VIEW), errors.ConfigError, "batch_size is 1 to 65536, got 0"),
        (
            lambda replay: replay.sample("t", 1, innet.NStep),
            TypeError,
            "a view is .*got type <class 'innet_drl.definitions.NStep'>",
        ),
        (
            lambda replay: replay.batches("t", 1, VIEW, beta="0.4"),
            TypeError,
            "beta is a number, or a function .*got 0.4",
        ),
        (lambda replay: next(replay.batches("t", 1, VIEW, beta=lambda: None)), TypeError, "returns a number, got None"),
        (
            lambda replay: replay.put_parameters("p", [np.ones(2)]),
            TypeError,
            "mapping of names to .*state_dict.*'list'",
        ),
        (lambda replay: replay.put_parameters("p", {1: np.ones(2)}), TypeError, "tensors is a mapping of names"),
        (lambda _: innet.Sequences(4, state="h"), TypeError, r"state is a sequence of names of columns, .*got h"),
        (lambda _: innet.Column("float31"), errors.ConfigError, "a column's dtype is bool, .*got float31"),
        (
            lambda _: innet.Memory(cast(Any, "t")),
            TypeError,
            "tables is a Table or a sequence of them, got <class 'str'>",
        ),
        (lambda _: innet.connect("unix:/tmp/s"), errors.ConfigError, r'"unix:/tmp/s" has no "://" after its scheme'),
        (lambda _: innet.connect("innet:/host:1"), errors.ConfigError, 'has no "://" after its scheme'),
    ],
)
def test_wrong_arguments_say_what_to_write(
    make_replay: MakeReplay, call: Any, error: type[Exception], message: str
) -> None:
    replay = make_replay([table()])
    with pytest.raises(error, match=message):
        call(replay)
    assert still_works(replay)


def test_a_dropped_table_and_a_memory_without_tables_are_named(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    writer = replay.writer("t", 1, VIEW, chunk_steps=1)
    replay.drop_table("t")
    writer.append(**step(0))
    with pytest.raises(errors.UnknownTableError, match=r'no table "t"; (it was dropped|the memory has no tables)'):
        writer.flush()
    with pytest.raises(errors.UnknownTableError, match="the memory has no tables: make it with `create_table`"):
        replay.sample("t", 1, VIEW)


def test_a_table_beyond_the_limit_is_refused() -> None:
    with innet.Memory(max_bytes=1_000_000) as replay:
        with pytest.raises(errors.TableError, match=r"of the 1000000 for tables.*lower capacity, .* max_bytes"):
            replay.create_table(table(capacity=1_000_000, capacity_bytes=1))
        replay.create_table(table(capacity=500))
        with pytest.raises(errors.ReplayError, match="limit"):
            replay.put_parameters("p", {"a": np.zeros(100_000)})


INTERRUPTED = """
import signal, sys, threading, time, innet_drl as innet
from steps import VIEW, step, table

# Where the tests run in the background, a shell has had Ctrl-C ignored, and Python takes that over.
signal.signal(signal.SIGINT, signal.default_int_handler)
memory = innet.Memory([table(min_size=500, samples_per_insert=1.0, slack=10.0)])
where, call = sys.argv[1:]
if where == "process":
    replay = memory
else:
    server = memory.serve(f"unix://{where}")
    replay = innet.connect(server.addresses[0])
writer = replay.writer("t", 1, VIEW, chunk_steps=1)
batches = replay.batches("t", 4, VIEW)


def write():
    for t in range(5000):
        writer.append(**step(t))
        writer.flush()


def ready_once_blocked():
    while not memory.stats()["tables"]["t"]["blocked_pushes"]:
        time.sleep(0.01)
    print("ready", flush=True)


def block():
    blocked = lambda: memory.stats()["tables"]["t"]["blocked_pushes"]
    threading.Thread(target=ready_once_blocked).start()
    try:
        with writer:
            try:
                write()
            finally:
                before = blocked()
    except KeyboardInterrupt:
        assert blocked() == before, "the end of the block has tried to push again"
        raise


calls = {
    "block": block,
    "sample": lambda: replay.sample("t", 4, VIEW),
    "batches": lambda: next(batches),
    "write": write,
}
try:
    if call != "block":
        print("ready", flush=True)
    calls[call]()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    batches.close()
    replay.close()
"""


@pytest.mark.parametrize(
    ("where", "call"),
    [*itertools.product(["process", "server"], ["sample", "batches", "write"]), ("process", "block")],
)
def test_ctrl_c_ends_a_wait(tmp_path: Path, where: str, call: str) -> None:
    arguments = [where if where == "process" else f"{tmp_path}/s", call]
    code = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n{INTERRUPTED}"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        try:
            output, problems = child.communicate(timeout=60)
        finally:
            child.kill()
    assert output == "interrupted\n", problems
    assert child.returncode == 0


LOADED = """
import innet_drl as innet
import numpy.lib
from steps import VIEW, step, table

def interrupted(*_):
    raise KeyboardInterrupt

numpy.lib.NumpyVersion = interrupted
with innet.Memory([table()]) as memory, memory.writer("t", 1, VIEW, chunk_steps=1) as writer:
    writer.append(**step(0))
"""


def test_no_call_loads_numpys_interface() -> None:
    """Ctrl-C while it is loaded, which runs Python code, would be a panic."""
    code = f"import sys; sys.path.insert(0, {str(HELPERS)!r})\n{LOADED}"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_forgotten_flags_are_named_once(make_replay: MakeReplay, caplog: pytest.LogCaptureFixture) -> None:
    """Every row says that it is the first of its episode, and none that an episode ended."""
    replay = make_replay([table()])
    with replay.writer("t", 1, VIEW, name="forgetful") as writer:
        for t in range(500):
            writer.append(**(step(t) | {"first": True, "terminated": False}))
    (warning,) = [line.getMessage() for line in caplog.records if "dropped" in line.getMessage()]
    assert 'writer "forgetful" of table "t" has dropped 49 windows and made 0 items' in warning
    assert "49 windows at a row with `first` that follows no terminated or truncated row" in warning


def test_one_table_needs_no_list(tmp_path: Path) -> None:
    with innet.Memory(table()) as replay, replay.serve(f"unix://{tmp_path}/s") as server:
        with innet.connect(server.addresses[0], tables=table("second")) as client:
            assert list(client.tables()) == ["second", "t"]
    with pytest.raises(TypeError):
        innet.Memory(3)  # type: ignore[arg-type]


def test_a_memory_without_a_limit_has_a_share_of_this_machine() -> None:
    with innet.Memory() as replay:
        with pytest.raises(errors.TableError) as raised:
            # 4 PiB.
            replay.create_table(innet.Table("huge", {"frame": ("uint8", (2**14, 2**14))}, 2**24))
        found = re.search(
            r"and of the (\d+) for tables and parameters \(max_bytes is not set, and by default 80 % of the (\d+) "
            r"bytes (of the machine|left in the control group of this process)\) there are \1 left: .*capacity.* raise "
            r"the memory's max_bytes",
            str(raised.value),
        )
        assert found is not None, raised.value
        limit, whole = int(found[1]), int(found[2])
        assert limit == whole // 100 * 80
        assert whole <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert limit <= replay.stats()["max_bytes"] <= limit + 2**30
        replay.create_table(table())
        assert still_works(replay)
