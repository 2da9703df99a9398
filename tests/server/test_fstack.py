"""F-Stack from Python: what is said where the package has none, and a memif with F-Stack at both ends where it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from serving import SERVER_CLI

import innet_drl as innet
from innet_drl import errors

CONFIG = """
[dpdk]
lcore_mask={mask}
channel=4
promiscuous=1
numa_on=0
no_huge=1
memory=128
file_prefix=python-{role}-{unique}
port_list=0
nb_vdev=0
pkt_tx_delay=0
idle_sleep=20
[port0]
addr={address}
netmask=255.255.255.0
broadcast=10.7.0.255
gateway=10.7.0.254
[innet]
eal = --no-pci
eal = --no-telemetry
eal = --vdev=net_memif0,role={role},id=0,mac=02:00:00:00:00:0{mask},socket={folder}/memif.sock
"""

# F-Stack starts once in a process and stays: the client has a process of its own.
CLIENT = """
import sys
sys.path.insert(0, "tests/helpers")
import innet_drl as innet
from steps import VIEW, fill, table
options = {"config": sys.argv[1], "token": "token of the tests", "tables": [table()]}
with innet.connect("innet+fstack://10.7.0.2:7710", **options) as replay:
    fill(replay, 200)
    batch = replay.sample("t", 64, VIEW, timeout=30)
    replay.update_priorities("t", batch.ids, batch.probabilities)
    print(len(batch), repr(replay))
"""


def missing() -> str:
    """What `connect` says of a configuration that is not there."""
    with pytest.raises(errors.ConfigError) as raised:
        innet.connect("innet+fstack://10.7.0.2:7710", config="/nowhere/fstack.ini")
    return str(raised.value)


def test_what_is_missing_is_named() -> None:
    assert "built without F-Stack" in missing() or "/nowhere/fstack.ini" in missing()
    with pytest.raises(errors.ConfigError, match="innet\\+fstack://"):
        innet.connect("innet://127.0.0.1:1", config="fstack.ini")


def test_a_client_reaches_a_server_over_memif(tmp_path: Path) -> None:
    if "built without F-Stack" in missing():
        pytest.skip("the package was built without the cargo feature fstack")

    def config(role: str, mask: int, address: str) -> str:
        path = tmp_path / f"{role}.ini"
        text = CONFIG.format(role=role, mask=mask, address=address, folder=tmp_path, unique=tmp_path.name)
        path.write_text(text)
        return str(path)

    serve = ["serve", "--stack=fstack", "--stack-config", config("server", 1, "10.7.0.2"), "--listen=10.7.0.2:7710"]
    secure = ["--token=token of the tests", "--trusted-network", "--max-bytes=2GiB"]
    with subprocess.Popen([*SERVER_CLI, *serve, *secure], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "ready on innet://10.7.0.2:7710" in server.stdout.readline()
            client = [sys.executable, "-c", CLIENT, config("client", 2, "10.7.0.1")]
            done = subprocess.run(client, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith("64 ")
            assert "innet+fstack://" in done.stdout
        finally:
            server.terminate()
        assert server.wait(timeout=60) == 0
