"""Named, versioned parameters: one whole version or nothing newer, as arrays of the reader's own."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from calls import Lines

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors


def test_versions_rise_and_only_newer_ones_are_handed_out(make_replay: MakeReplay) -> None:
    replay = make_replay()
    assert replay.get_parameters("policy") is None
    weights = {"layer.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "steps": np.int64(7)}
    assert replay.put_parameters("policy", weights) == 1
    assert replay.put_parameters("policy", {**weights, "steps": np.int64(8)}) == 2
    assert replay.put_parameters("other", weights) == 1
    newest = replay.get_parameters("policy")
    assert newest is not None
    assert newest.version == 2
    assert repr(newest) == "<Parameters version 2, 2 tensors>"
    np.testing.assert_array_equal(newest.tensors["layer.weight"], weights["layer.weight"])
    assert newest.tensors["steps"].shape == ()
    assert newest.tensors["steps"] == 8
    assert replay.get_parameters("policy", newer_than=1) is not None
    assert replay.get_parameters("policy", newer_than=2) is None


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"],
)
def test_every_dtype_and_layout_comes_back_bit_for_bit(make_replay: MakeReplay, dtype: str) -> None:
    replay = make_replay()
    random = np.random.default_rng(0).integers(0, 2, (4, 3, 5)).astype(dtype)
    tensors = {"plain": random, "transposed": random.T, "strided": random[::2, :, 1:], "empty": random[:0]}
    replay.put_parameters("p", tensors)
    got = replay.get_parameters("p")
    assert got is not None
    assert set(got.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(got.tensors[name], tensor)
        assert got.tensors[name].flags.writeable
        assert got.tensors[name].flags.aligned


def test_parameters_are_loaded_into_a_module(make_replay: MakeReplay) -> None:
    torch = pytest.importorskip("torch")
    replay = make_replay()
    published, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    replay.put_parameters("policy", published.state_dict())
    got = replay.get_parameters("policy", device="cpu")
    assert got is not None
    other.load_state_dict(got.tensors)
    assert torch.equal(other.weight, published.weight)


def test_a_reader_owns_its_arrays(make_replay: MakeReplay) -> None:
    replay = make_replay()
    mine = np.ones(1000, np.float32)
    replay.put_parameters("p", {"w": mine})
    mine[:] = 5
    first = replay.get_parameters("p")
    assert first is not None
    assert (first.tensors["w"] == 1).all()
    first.tensors["w"][:] = 9
    second = replay.get_parameters("p")
    assert second is not None
    assert (second.tensors["w"] == 1).all()
    array = second.tensors["w"]
    replay.close()
    del second, replay
    assert (array == 1).all()


def test_bfloat16_rounds_to_nearest_and_comes_back_as_float32(make_replay: MakeReplay) -> None:
    torch = pytest.importorskip("torch")
    replay = make_replay()
    values = np.random.default_rng(1).normal(size=500).astype(np.float32)
    tensors = {"f32": values, "f64": values.astype(np.float64), "count": np.arange(3)}
    replay.put_parameters("p", tensors, dtype="bfloat16")
    got = replay.get_parameters("p")
    assert got is not None
    rounded = torch.from_numpy(values).bfloat16().float().numpy()
    np.testing.assert_array_equal(got.tensors["f32"], rounded)
    assert got.tensors["f64"].dtype == np.float32
    np.testing.assert_array_equal(got.tensors["f64"], rounded)
    assert got.tensors["count"].dtype == np.int64


def test_a_state_dict_goes_there_and_back(make_replay: MakeReplay) -> None:
    torch = pytest.importorskip("torch")
    replay = make_replay()
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 2))
    network[0].to(memory_format=torch.channels_last)
    replay.put_parameters("policy", network.state_dict())
    replay.put_parameters("half", {"w": torch.linspace(0, 1, 7, dtype=torch.bfloat16)})
    got = replay.get_parameters("policy")
    assert got is not None
    state = {name: torch.from_numpy(array) for name, array in got.tensors.items()}
    for name, tensor in network.state_dict().items():
        assert torch.equal(state[name], tensor), name
    network.load_state_dict(state)
    half = replay.get_parameters("half")
    assert half is not None
    expected = torch.linspace(0, 1, 7, dtype=torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(half.tensors["w"], expected)


def test_a_reader_never_sees_parts_of_two_versions(make_replay: MakeReplay) -> None:
    replay = make_replay()
    replay.put_parameters("p", {"a": np.full(50_000, 1.0), "b": np.full(50_000, 1.0)})
    stop = threading.Event()

    def write() -> None:
        version = 1.0
        while not stop.is_set():
            version += 1
            replay.put_parameters("p", {"a": np.full(50_000, version), "b": np.full(50_000, version)})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        newest = 0
        for _ in range(50):
            got = replay.get_parameters("p")
            assert got is not None
            values = np.unique(np.concatenate([got.tensors["a"], got.tensors["b"]]))
            assert values.tolist() == [float(got.version)]
            assert got.version >= newest
            newest = got.version
    finally:
        stop.set()
        writer.join()


def test_what_cannot_be_stored_is_named(make_replay: MakeReplay) -> None:
    replay = make_replay()
    with pytest.raises(errors.ParametersError, match=r'"names".*<U1'):
        replay.put_parameters("p", {"names": np.array(["a"])})
    with pytest.raises(errors.ParametersError, match=r'"z".*complex'):
        replay.put_parameters("p", {"z": np.zeros(2, complex)})
    with pytest.raises(errors.ConfigError, match="bfloat16"):
        replay.put_parameters("p", {"a": np.zeros(2)}, dtype="float8")  # type: ignore[arg-type]
    assert replay.get_parameters("p") is None


def test_parameters_live_in_the_memory_not_the_client(tmp_path: object) -> None:
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/s") as server:
        with innet.connect(server.addresses[0]) as client:
            client.put_parameters("p", {"a": np.float32(3)})
        with innet.connect(server.addresses[0]) as client:
            got = client.get_parameters("p")
            assert got is not None
            assert got.tensors["a"] == 3
        local = memory.get_parameters("p")
        assert local is not None
        assert local.version == 1


def test_parameters_of_a_misspelt_name_are_named_once(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay()
    # Before the first put, an actor waits.
    assert replay.get_parameters("polcy") is None
    replay.put_parameters("policy", {"w": np.zeros(3, np.float32)})
    for _ in range(3):
        assert replay.get_parameters("polcy") is None
    assert replay.get_parameters("policy", newer_than=1) is None
    assert [line for line in log.lines if "get_parameters" in line] == [
        'get_parameters has found no parameters "polcy" yet, only ["policy"]'
    ]
