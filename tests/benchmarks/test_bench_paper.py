"""`python -m benchmarks paper`: every system for a moment, and the rows, tables and picture that it leaves."""

import json
import re
import subprocess
from pathlib import Path

import pytest

import innet_drl as innet
from benchmarks import results, services
from benchmarks.__main__ import main
from innet_drl import _core
from innet_drl.analysis import pictures

pytestmark = pytest.mark.slow

LATENCIES = {"actor push", "actor pull", "learner set", "learner sampling"}
SHORT = ["paper", "--actors", "2", "--seconds", "0.3", "--actor-ms", "50", "--update-ms", "30"]


def rows_of(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(path.read_text())["rows"]
    return rows


def machine_of(path: Path) -> dict[str, object]:
    machine: dict[str, object] = json.loads(path.read_text())["machine"]
    return machine


@pytest.mark.parametrize("format_name", ["frames", "stacks"])
def test_our_systems_give_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str], format_name: str) -> None:
    out = tmp_path / "out.json"
    flags = [
        "--systems",
        "shared,sampling,ahead",
        "--stacks",
        "fstack,kernel",
        "--formats",
        format_name,
        "--json",
        str(out),
    ]
    reason = "name its configurations with --fstack-server"
    if format_name == "frames":
        # A stack that is asked for and does not start keeps no other from being measured.
        flags += ["--fstack-server", str(tmp_path / "missing.ini"), "--fstack-client", str(tmp_path / "{index}.ini")]
        reason = ""
    main([*SHORT, *flags])
    told = capsys.readouterr().out
    assert f"fstack is left out: {reason}" in told
    assert "up to 2 actors, the learner and the server share" in told
    machine = machine_of(out)
    assert machine["innet_drl"] == innet.__version__
    assert machine["fstack"] == _core.fstack_release
    assert "redis" not in machine
    rows = rows_of(out)
    assert {(row["system"], row["stack"], row["link"], row["format"], row["actors"]) for row in rows} == {
        ("shared", "kernel", "loopback", format_name, 2),
        ("sampling", "kernel", "loopback", format_name, 2),
        ("ahead", "kernel", "loopback", format_name, 2),
    }
    for system in ("shared", "sampling", "ahead"):
        figures_of = {str(row["what"]): row for row in rows if row["system"] == system}
        assert LATENCIES | {"pushes", "experiences", "communication"} <= figures_of.keys()
        for what in LATENCIES:
            p50, p99 = figures_of[what]["p50_ms"], figures_of[what]["p99_ms"]
            assert isinstance(p50, float)
            assert isinstance(p99, float)
            assert 0 < p50 <= p99
        for role in ("actors", "learner"):
            shares = [row["share"] for what, row in figures_of.items() if what.startswith(f"{role}: ")]
            assert len(shares) == 3
            assert sum(float(str(share)) for share in shares) == pytest.approx(1, abs=1e-3)
        assert figures_of["pushes"]["ideal_per_s"] == pytest.approx(40)
        assert figures_of["experiences"]["per_s"] == pytest.approx(
            200 * float(str(figures_of["pushes"]["per_s"])), rel=1e-2
        )
    assert "| in-network sampling, kernel |" in told
    if pictures.can_draw():
        assert "<svg" in (tmp_path / "out.svg").read_text()


@pytest.mark.parametrize("systems", ["sampling,edge", "redis"])
def test_throughput_and_bytes_against_the_delay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], systems: str
) -> None:
    if systems == "redis" and (reason := services.why_not_redis(None)):
        pytest.skip(reason)
    out = tmp_path / "out.json"
    flags = ["--delay-ms", "0.5,5", "--link-mbit", "1000", "--systems", systems, "--stacks", "fstack,kernel"]
    main([*SHORT, *flags, "--json", str(out)])
    told = capsys.readouterr().out
    assert "fstack is left out: --delay-ms relays the kernel's TCP" in told
    rows = rows_of(out)
    assert {(row["system"], row["link"], row["format"], row["delay_ms"]) for row in rows} == {
        (system, "relay", "frames", delay) for system in systems.split(",") for delay in (0.5, 5.0)
    }
    for row in rows:
        if row["what"] in ("updates", "experiences"):
            assert float(str(row["per_s"])) > 0
        if str(row["what"]).endswith("link"):
            assert float(str(row["mb_per_s"])) > 0
    assert ("| edge server, sampled ahead |" in told) == ("edge" in systems)
    if pictures.can_draw():
        assert "one-way delay" in (tmp_path / "out.svg").read_text()


def test_a_picture_keeps_what_is_seen() -> None:
    drawn = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"><metadata/>
        <g id="a"><path d="M 0.123
        L 1 2.96" style="fill: red"/></g><g id="b"><path d="M 3 4" style="fill: red"/></g>
        <path id="mark" d="M 0 0" style="fill: red"/><use xlink:href="#mark" x="2.04"/>
        <g clip-path="url(#c1.25)"><text style="font-size: 8px; font-family: 'DejaVu Sans'">1.25</text></g></svg>"""
    lines = pictures.lean(drawn).splitlines()
    assert lines[1:] == [
        '<path d="M 0.1 L 1 3 M 3 4" style="fill: red" />',
        '<path id="mark" d="M 0 0" style="fill: red" />',
        '<use xlink:href="#mark" x="2" />',
        '<g clip-path="url(#c1.25)">',
        '<text style="font-size: 8px;">1.25</text>',
        "</g>",
        "</svg>",
    ]


def test_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no Redis the command says so."""
    out = tmp_path / "out.json"
    flags = [*SHORT, "--systems", "redis", "--formats", "frames", "--json", str(out)]
    if services.why_not_redis(None):
        with pytest.raises(SystemExit, match="nothing is left to measure"):
            main(flags)
        assert "redis is left out" in capsys.readouterr().out
        return
    main(flags)
    assert {(row["system"], row["stack"]) for row in rows_of(out)} == {("redis", "kernel")}
    assert {row["what"] for row in rows_of(out)} >= LATENCIES
    release = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    assert f" v={machine_of(out)['redis']} " in release


def test_the_results_name_the_commit_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the checkout that has the package, and no other repository's."""

    def git(*arguments: str) -> str:
        flags = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
        return subprocess.run(["git", *flags, *arguments], capture_output=True, text=True, check=True).stdout.strip()

    package = tmp_path / "innet_drl" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    monkeypatch.setattr(innet, "__file__", str(package))

    monkeypatch.setattr(results, "_commit", results._commit.__wrapped__)

    def commit() -> object:
        results.write(tmp_path / "out.json", [], {})
        return machine_of(tmp_path / "out.json")["commit"]

    assert commit() is None
    git("init")
    git("commit", "--allow-empty", "--message", "nothing of it")
    assert commit() is None
    git("add", "innet_drl")
    git("commit", "--message", "the package")
    assert commit() == git("describe", "--always")
    package.write_text("changed = True")
    assert commit() == git("describe", "--always") + "-dirty"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--actors", "two"], "--actors two: it must be numbers"),
        (["--actors", "0"], "--actors 0: it must be numbers"),
        (["--systems", "memcached"], "'memcached' is none of redis, shared, sampling"),
        (["--formats", "frames,png"], "'png' is none of stacks, frames"),
        (["--stacks", "rdma"], "'rdma' is none of kernel, kernel-spin, fstack"),
        (["--systems", "edge"], "'edge' is none of redis, shared, sampling, ahead"),
        (["--delay-ms", "5,five"], "--delay-ms 5,five: it must be different numbers"),
        (["--delay-ms=-1"], "--delay-ms -1: it must be different numbers"),
        (["--delay-ms", "5,5"], "--delay-ms 5,5: it must be different numbers"),
        (["--link-mbit", "100"], "beside --delay-ms"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(part)):
        main(["paper", *flags])
