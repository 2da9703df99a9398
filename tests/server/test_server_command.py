"""`innet-replay` as the wheel brings it: the Rust command line behind a Python function."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import SERVER_CLI, Server
from steps import VIEW, fill, table

import innet_drl as innet
from benchmarks import processes


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, end: signal.Signals) -> None:
    address = f"unix://{tmp_path}/s"
    serve = [*SERVER_CLI, "serve", "--listen", address]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert f"ready on {address}" in server.stdout.readline()
        with innet.connect(address, tables=[table()]) as replay:
            fill(replay, 20)
            assert len(replay.sample("t", 4, VIEW, timeout=10)) == 4
        server.send_signal(end)
        _, problems = server.communicate(timeout=60)
        assert server.returncode == 0, problems


def test_its_exit_status_is_that_of_the_command() -> None:
    version = subprocess.run([*SERVER_CLI, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"innet-replay {innet.__version__}\n"
    wrong = subprocess.run([*SERVER_CLI, "serve", "--listen", "http://a"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "http://a" in wrong.stderr


@pytest.mark.parametrize(("module", "name"), [("server_cli", "innet-replay"), ("cli", "innet-drl")])
def test_modules_of_commands_run(module: str, name: str) -> None:
    """As `python -m innet_drl` does, where no script is installed."""
    command = [sys.executable, "-m", f"innet_drl.{module}", "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True)
    assert version.stdout == f"{name} {innet.__version__}\n"


def test_doctor_says_what_is_there() -> None:
    """What it finds depends on the machine; what it says of it does not."""
    told = subprocess.run([*SERVER_CLI, "doctor"], capture_output=True, text=True, check=False)
    states = [line.split()[0] for line in told.stdout.splitlines() if not line.startswith(" ")]
    assert len(states) == 4
    assert set(states) <= {"ok", "missing"}
    assert told.stdout.count("to do: ") == states.count("missing")
    assert told.returncode == int("missing" in states)
    as_json = subprocess.run([*SERVER_CLI, "doctor", "--json"], capture_output=True, text=True, check=False)
    checks = json.loads(as_json.stdout)
    assert checks["ok"] == (as_json.returncode == 0)
    assert [check["ok"] for check in checks["checks"]] == [state == "ok" for state in states]


def test_doctor_checks_the_kernel_alone_for_the_settings_of_a_server(tmp_path: Path) -> None:
    settings = tmp_path / "server.toml"
    settings.write_text(f'listen = ["unix://{tmp_path}/s"]\nmax_bytes = "1MiB"\nmax_frame_bytes = "64KiB"\n')
    command = [*SERVER_CLI, "doctor", "--json", "--stack=kernel", "--config", str(settings), "--gradients=127.0.0.1:0"]

    def checks(*flags: str) -> dict[str, Any]:
        told = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
        return {check["check"]: check for check in json.loads(told.stdout)["checks"]}

    found = checks()
    assert list(found) == ["configuration", "open files", "memory", "addresses", "gradients", "UDP buffers"]
    assert found["configuration"]["ok"]
    assert found["memory"]["ok"]
    assert found["addresses"]["ok"]
    assert not list(tmp_path.glob("s"))
    with innet.Memory() as replay, replay.serve(f"unix://{tmp_path}/s"):
        taken = checks("--max-bytes=100000GiB")
    assert "a server is running there" in taken["addresses"]["found"]
    assert "--max-bytes" in taken["memory"]["to_do"]


def test_doctor_looks_for_what_a_configuration_needs(tmp_path: Path) -> None:
    config = tmp_path / "fstack.ini"
    config.write_text("[dpdk]\nlcore_mask=1\nno_huge=1\n[port0]\n[innet]\neal = --no-pci\neal = --vdev=net_memif0\n")
    command = [*SERVER_CLI, "doctor", "--json", "--stack-config"]
    told = subprocess.run([*command, str(config)], capture_output=True, text=True, check=False)
    checks = {check["check"]: check for check in json.loads(told.stdout)["checks"]}
    for check in ("hugepages", "network card"):
        assert checks[check]["ok"]
        assert "not needed" in checks[check]["found"]
    wrong = subprocess.run([*command, str(tmp_path / "missing.ini")], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "missing.ini" in wrong.stderr


def test_tables_are_listed_emptied_and_dropped(tmp_path: Path) -> None:
    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*SERVER_CLI, *arguments], capture_output=True, text=True, check=False)

    with innet.Memory([table("kept"), table("old run")]) as replay, replay.serve(f"unix://{tmp_path}/s") as server:
        address = server.addresses[0]
        fill(replay, 20, name="kept")
        listed = ask("tables", address).stdout.splitlines()
        assert listed[0].startswith("kept  20 steps  ")
        assert listed[1] == "old run  0 steps  0 items  0 B"
        assert ask("empty", "kept", address).returncode == 0
        assert replay.stats()["tables"]["kept"]["steps"] == 0
        assert ask("drop", "old run", address).returncode == 0
        assert list(replay.tables()) == ["kept"]
        again = ask("drop", "old run", address)
        assert again.returncode == 1
        assert 'there is no table "old run"' in again.stderr


def test_statistics_are_printed_again_and_again(tmp_path: Path) -> None:
    with innet.Memory(table()) as replay, replay.serve(f"unix://{tmp_path}/s") as server:
        watch = [*SERVER_CLI, "stats", server.addresses[0], "--json", "--watch", "1"]
        with subprocess.Popen(watch, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            uptimes = [json.loads(watching.stdout.readline())["uptime_s"] for _ in range(2)]
            watching.kill()
    assert uptimes[0] < uptimes[1]


def test_the_memory_of_dropped_tables_goes_back_to_the_system(tmp_path: Path) -> None:
    def make_and_drop(thread: int) -> None:
        with innet.connect(server.address) as memory:
            for _ in range(10):
                names = [f"{thread}-{number}" for number in range(10)]
                for name in names:
                    # About 6 MiB: less than the blocks that every allocator returns.
                    memory.create_table(innet.Table(name, {"x": "uint8"}, 1 << 16, capacity_bytes=1 << 20))
                for name in names:
                    memory.drop_table(name)

    with Server(f"unix://{tmp_path}/s", "--io-threads=4") as server:
        make_and_drop(0)
        before = processes.resident_bytes(server.pid)
        threads = [threading.Thread(target=make_and_drop, args=(thread,)) for thread in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        grown = processes.resident_bytes(server.pid) - before
    assert grown < 32 << 20, f"{grown >> 20} MiB are kept"
