"""Integer arguments out of range: one error that names the argument, for every function of the core."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import _core, errors
from innet_drl.gradients import Station
from steps import table

SPACE = gymnasium.spaces.Discrete(2)
STUB = Path(_core.__file__).parent / "_core.pyi"


def integers_of_the_stub() -> set[str]:
    """Every integer argument of the core, as `Class.method.argument` or `function.argument`."""
    found = set()
    for node in ast.parse(STUB.read_text()).body:
        functions = [node, *(node.body if isinstance(node, ast.ClassDef) else [])]
        for function in functions:
            if not isinstance(function, ast.FunctionDef):
                continue
            owner = "" if function is node else f"{cast(ast.ClassDef, node).name}."
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                if argument.annotation is not None and ast.unparse(argument.annotation) in ("int", "int | None"):
                    found.add(f"{owner}{function.name}.{argument.arg}".replace("__new__.", ""))
    return found


def test_an_integer_out_of_range_is_named_in_every_signature(make_replay: MakeReplay) -> None:
    """One class of the package's own, in process and served, whatever the argument."""
    replay = make_replay([table()])
    window = innet.Window(0, 0)
    local = innet.Memory()
    parameters = _core.ParameterServer
    made: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
        "Table": (innet.Table, {"name": "t", "columns": {"a": "uint8"}, "capacity": 1}),
        "Table.from_spaces": (
            innet.Table.from_spaces,
            {"name": "t", "observation_space": SPACE, "action_space": SPACE, "capacity": 1},
        ),
        "NStep": (innet.NStep, {}),
        "Sequences": (innet.Sequences, {"length": 2}),
        "Window": (innet.Window, {"before": 0, "after": 0}),
        "Relay": (_core.Relay, {"to": "127.0.0.1:1"}),
        "ParameterServer": (parameters, {"workers": 1, "max_bytes": 1}),
        "SumTree": (innet.SumTree, {"capacity": 4}),
        "SumTree.sample": (innet.SumTree(4).sample, {"batch_size": 1}),
        "Station": (Station, {"device": "net_null0", "address": "10.0.0.1"}),
        "Memory": (innet.Memory, {}),
        "Replay.writer": (replay.writer, {"table": "t", "num_envs": 1, "view": window}),
        "Replay.sample": (replay.sample, {"table": "t", "batch_size": 1, "view": window}),
        "Replay.batches": (replay.batches, {"table": "t", "batch_size": 1, "view": window}),
        "Replay.get_parameters": (replay.get_parameters, {"name": "p"}),
        "Replay.join_gradients": (replay.join_gradients, {"job": "j", "worker": 0, "workers": 1}),
        "Replay.follow_gradients": (
            replay.follow_gradients,
            {"job": "j", "worker": 0, "workers": 1, "values": 1, "threshold": 1},
        ),
        "Memory.serve": (local.serve, {"addresses": "innet://127.0.0.1:0"}),
    }
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        (address,) = server.addresses
        gradient = np.zeros(4, np.float32)
        with (
            innet.connect(address) as client,
            client.join_gradients("sum", worker=0, workers=1) as worker,
            client.follow_gradients("follow", worker=0, workers=1, values=4, threshold=1) as updates,
        ):
            made["GradientWorker.set_threshold"] = (worker.set_threshold, {"threshold": 1})
            made["GradientUpdates.offer"] = (updates.offer, {"gradient": gradient, "index": 0})
            made["GradientUpdates.restart"] = (updates.restart, {"index": 0})
            expected = integers_of_the_stub()
            assert {name.rpartition(".")[0] for name in expected} == set(made)
            for name in expected:
                owner, _, argument = name.rpartition(".")
                call, arguments = made[owner]
                for value in (-(2**80), 2**80):
                    with pytest.raises(errors.ConfigError) as raised:
                        call(**{**arguments, argument: value})
                    assert re.fullmatch(rf"{argument} is an integer from .*, got {value}", str(raised.value)), name
                with pytest.raises(TypeError, match=argument):
                    call(**{**arguments, argument: "many"})
    for bad in (-1, (2, -1)):
        with pytest.raises(errors.ConfigError, match="a shape is a tuple of positive integers"):
            innet.Column("uint8", bad)
