"""`python -m benchmarks paper`: every system for a moment, and the lines, tables and picture that it leaves."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import innet_drl as innet
from benchmarks import services
from benchmarks.__main__ import main
from innet_drl.analysis import pictures

pytestmark = pytest.mark.slow

LATENCIES = {"actor push", "actor pull", "learner set", "learner sampling"}
SHORT = ["paper", "--actors", "2", "--seconds", "0.3", "--actor-ms", "50", "--update-ms", "30"]
Measure = Callable[..., tuple[list[dict[str, Any]], str, str]]


@pytest.fixture
def measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs the command; returns its lines, the messages on standard error, and the tables of the lines."""

    def measure(*flags: str) -> tuple[list[dict[str, Any]], str, str]:
        main([*SHORT, *flags])
        told = capsys.readouterr()
        record = tmp_path / "out.jsonl"
        record.write_text(told.out)
        if not pictures.can_draw():
            pytest.skip("no matplotlib")
        main(["figures", str(record)])
        assert "<svg" in record.with_suffix(".svg").read_text()
        return [json.loads(line) for line in told.out.splitlines()], told.err, capsys.readouterr().out

    return measure


@pytest.mark.parametrize("format_name", ["frames", "stacks"])
def test_our_systems_give_every_figure(tmp_path: Path, measured: Measure, format_name: str) -> None:
    flags = ["--systems", "shared", "sampling", "ahead", "--stacks", "fstack", "kernel", "--formats", format_name]
    reason = "name its configurations with --fstack-server"
    if format_name == "frames":
        # A stack that is asked for and does not start keeps no other from being measured.
        flags += ["--fstack-server", str(tmp_path / "missing.ini"), "--fstack-client", str(tmp_path / "{index}.ini")]
        reason = "its server did not start, see its message above"
    rows, told, tables = measured(*flags)
    assert f"fstack is left out: {reason}" in told
    assert "up to 2 actors, the learner and the server share" in told
    assert {row["version"] for row in rows} == {f"innet-drl {innet.__version__}"}
    assert {(row["system"], row["stack"], row["link"], row["format"], row["actors"]) for row in rows} == {
        ("shared", "kernel", "loopback", format_name, 2),
        ("sampling", "kernel", "loopback", format_name, 2),
        ("ahead", "kernel", "loopback", format_name, 2),
    }
    for system in ("shared", "sampling", "ahead"):
        figures_of = {str(row["what"]): row for row in rows if row["system"] == system}
        assert LATENCIES | {"pushes", "experiences", "communication"} <= figures_of.keys()
        for what in LATENCIES:
            assert figures_of[what]["unit"] == "ms"
            assert 0 < figures_of[what]["value"] <= figures_of[what]["p99_ms"] * 1.001
        for role in ("actors", "learner"):
            shares = [row["value"] for what, row in figures_of.items() if what.startswith(f"{role}: ")]
            assert len(shares) == 3
            assert sum(shares) == pytest.approx(1, abs=1e-3)
        assert figures_of["pushes"]["ideal"] == pytest.approx(40)
        assert figures_of["experiences"]["value"] == pytest.approx(200 * figures_of["pushes"]["value"], rel=1e-2)
    assert "| in-network sampling, kernel |" in tables


@pytest.mark.parametrize("system", ["edge", "redis"])
def test_throughput_and_bytes_against_the_delay(measured: Measure, tmp_path: Path, system: str) -> None:
    if system == "redis" and (reason := services.why_not_redis(None)):
        pytest.skip(reason)
    systems = ["redis"] if system == "redis" else ["sampling", "edge"]
    flags = ["--delay-ms", "0.5", "5", "--link-mbit", "1000", "--stacks", "fstack", "kernel"]
    rows, told, tables = measured(*flags, "--systems", *systems)
    assert "fstack is left out: --delay-ms relays the kernel's TCP" in told
    assert {(row["system"], row["link"], row["format"], row["delay_ms"]) for row in rows} == {
        (each, "relay", "frames", delay) for each in systems for delay in (0.5, 5.0)
    }
    for row in rows:
        if row["what"] in ("updates", "experiences") or row["what"].endswith("link"):
            assert row["value"] > 0
    assert ("| edge server, sampled ahead |" in tables) == (system == "edge")
    assert "one-way delay" in (tmp_path / "out.svg").read_text()


def test_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no Redis the command says so."""
    flags = [*SHORT, "--systems", "redis", "--formats", "frames"]
    if services.why_not_redis(None):
        with pytest.raises(SystemExit, match="nothing is left to measure"):
            main(flags)
        assert "redis is left out" in capsys.readouterr().err
        return
    main(flags)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["system"], row["stack"]) for row in rows} == {("redis", "kernel")}
    assert {row["what"] for row in rows} >= LATENCIES
    release = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    assert f" v={rows[0]['version'].removeprefix('Redis ')} " in release


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--actors", "0"], "--actors: numbers of at least 1"),
        (["--systems", "edge"], "--systems edge: it belongs beside --delay-ms"),
        (["--delay-ms", "-1"], "--delay-ms: numbers of at least 0"),
        (["--delay-ms", "nan"], "--delay-ms: numbers of at least 0"),
        (["--link-mbit", "100"], "beside --delay-ms"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(part)):
        main(["paper", *flags])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--actors", "two"], "two"),
        (["--systems", "memcached"], "memcached"),
        (["--formats", "frames", "png"], "png"),
        (["--stacks", "rdma"], "rdma"),
        (["--delay-ms", "5", "five"], "five"),
    ],
)
def test_malformed_flags_are_named(capsys: pytest.CaptureFixture[str], flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit):
        main(["paper", *flags])
    told = capsys.readouterr().err
    assert part in told
    assert flags[0] in told
