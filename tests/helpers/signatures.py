"""Every function and constructor of the client that takes numbers: found in its source, with valid arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from steps import VIEW, fill, step, table

import innet_drl as innet
from innet_drl import _core, definitions
from innet_drl.gradients import Station

STUB = Path(_core.__file__).parent / "_core.pyi"


class Call(NamedTuple):
    """A function with valid arguments."""

    function: Callable[..., object]
    arguments: dict[str, Any]


class Space(NamedTuple):
    """The part of a Gymnasium space that a table reads."""

    dtype: str = "uint8"
    shape: tuple[int, ...] = ()


class Environment:
    """Episodes of one step."""

    observation_space = action_space = Space()

    def reset(self) -> tuple[np.uint8, dict[str, Any]]:
        return np.uint8(0), {}

    def step(self, _action: object) -> tuple[np.uint8, float, bool, bool, dict[str, Any]]:
        return np.uint8(1), 0.0, True, False, {}

    def close(self) -> None:
        pass


def numbers() -> dict[tuple[str, str], str]:
    """Arguments that are numbers: `Class.method` or function, and argument, with the kind of number."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(STUB.read_text()).body:
        for function in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
            private = getattr(function, "name", "").startswith("_")
            if not isinstance(function, ast.FunctionDef) or (private and function.name != "__new__"):
                continue
            owner = node.name if isinstance(node, ast.ClassDef) else ""
            name = ".".join(part for part in (owner, function.name) if part not in ("", "__new__"))
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                for kind in kinds(argument.annotation):
                    found[name, argument.arg] = kind
    made = {name: getattr(definitions, name) for name in definitions.__all__}
    made["Table.from_spaces"] = innet.Table.from_spaces
    for name, call in made.items():
        for taken, known in inspect.signature(call).parameters.items():
            for kind in kinds(ast.parse(str(known.annotation), mode="eval").body):
                found[name, taken] = kind
    for name, method in inspect.getmembers(innet.Recorder, inspect.isfunction):
        if not name.startswith("_"):
            for parameter, annotation in inspect.get_annotations(method).items():
                for kind in kinds(ast.parse(annotation, mode="eval").body):
                    found[f"Recorder.{name}", parameter] = kind
    return found


def kinds(annotation: ast.expr | None) -> list[str]:
    if annotation is None:
        return []
    parts = ast.unparse(annotation).split(" | ")
    return [kind for kind in ("int", "float") if kind in parts or (kind, parts[0]) == ("int", "tuple[int, ...]")]


@contextmanager
def calls(make_replay: Callable[..., innet.Replay]) -> Iterator[dict[str, Call]]:
    """A call of every function of `numbers`, in a replay of `make_replay`."""
    recorded_table = innet.Table.from_spaces("recorded", Space(), Space(), 100, view=innet.NStep())
    queue = innet.Table.queue("queue", table().columns, 1000, view=VIEW)
    replay = make_replay([table(), table("dropped"), recorded_table, queue])
    fill(replay, 50)
    memory = innet.Memory()
    with (
        innet.Memory() as summing,
        summing.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server,
        innet.connect(server.addresses[0]) as client,
        client.join_gradients("sum", worker=0, workers=1, deadline=2.0) as worker,
        client.follow_gradients("follow", worker=0, workers=1, values=4, threshold=1, deadline=2.0) as updates,
        replay.writer("t", 1, VIEW) as writer,
    ):
        names = iter(range(10_000))

        def made(**arguments: Any) -> None:
            """A table, made in the replay and dropped again."""
            name = f"made{next(names)}"
            replay.create_table(innet.Table(name, {"a": "uint8"}, **arguments))
            replay.drop_table(name)

        def joined(**arguments: Any) -> None:
            client.join_gradients(f"job{next(names)}", **arguments).leave()

        def followed(**arguments: Any) -> None:
            client.follow_gradients(f"job{next(names)}", **arguments).leave()

        def served(**arguments: Any) -> None:
            memory.serve("innet://127.0.0.1:0", **arguments).close()

        def closed(**arguments: Any) -> None:
            replay.writer("t", 1, VIEW).close(**arguments)

        def left(**arguments: Any) -> None:
            client.join_gradients(f"job{next(names)}", worker=0, workers=1).leave(**arguments)

        def recorded(method: str, *positional: object) -> Callable[..., None]:
            def call(**arguments: Any) -> None:
                recorder = innet.Recorder(Environment(), replay.writer("recorded", 1))
                recorder.reset()
                getattr(recorder, method)(*positional, **arguments)
                recorder.close()

            return call

        def shape(**arguments: Any) -> None:
            replay.create_table(innet.Table("shaped", {"a": innet.Column("uint8", **arguments)}, capacity=1))
            replay.drop_table("shaped")

        def batches(**arguments: Any) -> None:
            with replay.batches("t", view=VIEW, **arguments) as iterator:
                next(iterator)

        def acknowledged(**arguments: Any) -> None:
            with replay.writer("queue", 1) as queued, replay.batches("queue", 1, acknowledge=True) as iterator:
                queued.append(**row)
                queued.flush()
                next(iterator).acknowledge(**arguments)

        row = step(0) | {"terminated": np.ones(1, bool)}
        yield {
            "Column": Call(shape, {"shape": 1}),
            "Table": Call(made, {"capacity": 1}),
            "Table.from_spaces": Call(
                innet.Table.from_spaces,
                {"name": "t", "observation_space": Space(), "action_space": Space(), "capacity": 1},
            ),
            "NStep": Call(innet.NStep, {}),
            "Sequences": Call(innet.Sequences, {"length": 2}),
            "Trajectory": Call(innet.Trajectory, {}),
            "Window": Call(innet.Window, {"before": 0, "after": 0}),
            "SumTree": Call(innet.SumTree, {"capacity": 4}),
            "SumTree.sample": Call(set_tree().sample, {"batch_size": 1}),
            "Station": Call(Station, {"device": "net_null0", "address": "10.0.0.1:1"}),
            "Memory": Call(innet.Memory, {}),
            "Memory.serve": Call(served, {}),
            "Writer.append": Call(writer.append, row),
            "Writer.extend": Call(writer.extend, {name: [value] for name, value in row.items()}),
            "Writer.flush": Call(writer.flush, {}),
            "Writer.close": Call(closed, {}),
            "Recorder.flush": Call(recorded("flush"), {}),
            "Recorder.close": Call(recorded("close"), {}),
            "Recorder.step": Call(recorded("step", 0), {}),
            "Replay.create_table": Call(replay.create_table, {"table": table()}),
            "Replay.table": Call(replay.table, {"name": "t"}),
            "Replay.tables": Call(replay.tables, {}),
            "Replay.parameters": Call(replay.parameters, {}),
            "Replay.empty_table": Call(replay.empty_table, {"name": "dropped"}),
            "Replay.drop_table": Call(drop(replay), {}),
            "Replay.writer": Call(replay.writer, {"table": "t", "num_envs": 1, "view": VIEW}),
            "Replay.sample": Call(replay.sample, {"table": "t", "batch_size": 1, "view": VIEW}),
            "Batch.acknowledge": Call(acknowledged, {}),
            "Replay.batches": Call(batches, {"batch_size": 1}),
            "Replay.update_priorities": Call(replay.update_priorities, {"table": "t", "ids": [], "priorities": []}),
            "Replay.put_parameters": Call(replay.put_parameters, {"name": "p", "tensors": {}}),
            "Replay.get_parameters": Call(replay.get_parameters, {"name": "p"}),
            "Replay.drop_parameters": Call(replay.drop_parameters, {"name": "p"}),
            "Replay.episodes": Call(lambda **arguments: list(replay.episodes(**arguments)), {"table": "t"}),
            "Replay.stats": Call(replay.stats, {}),
            "Replay.join_gradients": Call(joined, {"worker": 0, "workers": 1}),
            "Replay.follow_gradients": Call(followed, {"worker": 0, "workers": 1, "values": 4, "threshold": 1}),
            "GradientWorker.sum": Call(worker.sum, {"values": np.zeros(4, np.float32)}),
            "GradientWorker.set_threshold": Call(worker.set_threshold, {"threshold": 1}),
            "GradientWorker.reset": Call(worker.reset, {}),
            "GradientWorker.force": Call(worker.force, {}),
            "GradientWorker.halt": Call(worker.halt, {"reason": "a test"}),
            "GradientWorker.leave": Call(left, {}),
            "GradientUpdates.offer": Call(updates.offer, {"gradient": np.zeros(4, np.float32), "index": 0}),
            "GradientUpdates.wait": Call(updates.wait, {"deadline": 0.1, "for_gradient": True}),
            "GradientUpdates.restart": Call(updates.restart, {"index": 0}),
            "connect": Call(lambda **options: innet.connect(server.addresses[0], **options).close(), {}),
        }


def set_tree() -> innet.SumTree:
    tree = innet.SumTree(4)
    tree.update([0], [1.0])
    return tree


def drop(replay: innet.Replay) -> Callable[..., None]:
    def call(**arguments: Any) -> None:
        replay.create_table(table("dropped"))
        replay.drop_table("dropped", **arguments)

    return call
