"""Machines in network namespaces, with a link of a given rate to a switch: the topology of a rack."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BURST = "8kb"
"""Burst of a link: a few packets, so that the rate also limits small vectors."""
QUEUE = "8mb"
"""Queue of a link: long enough to lose no packet."""
MACHINE_DEVICE = "uplink"
"""Device of a machine at its link."""
TO_SWITCH, TO_RACK, RACK_TO_SWITCH = "10.77", "10.78", "10.79"
"""First bytes of a link's network, by its ends; the third byte is the number of the machine or rack."""
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Links:
    """A switch, switches of racks, and machines, at addresses x.1 and x.2 of each link; or all of them on loopback."""

    prefix: str | None
    """Prefix of the names of network namespaces; `None` for loopback."""

    def namespace(self, name: str | int) -> str | None:
        """Namespace of `"switch"`, of a machine by its number, or of `"rack0"` and following; `None` for loopback."""
        return self.prefix and f"{self.prefix}-{name}"

    def address(self, number: int) -> str:
        """Address of a machine."""
        return f"{TO_SWITCH}.{number}.2" if self.prefix else "127.0.0.1"

    def at(self, url: str, link: str, number: int) -> str:
        """URL, at a link of its switch, of a server that listens on all addresses."""
        return url.replace("0.0.0.0", f"{link}.{number}.1")


@contextlib.contextmanager
def links(workers: int, racks: int, mbit: int) -> Iterator[Links]:
    """Makes links of the given Mbit/s in each direction, from the workers and one more machine to a switch.

    Args:
        workers: Number of workers.
        racks: Number of racks. Worker n has a link to the switch of rack n modulo `racks`, which has one to the switch.
        mbit: Mbit/s; 0 makes no links.

    Raises:
        SystemExit: The links cannot be made: a permission or `iproute2` is missing.
    """
    if not mbit:
        yield Links(None)
        return
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("--link-mbit wants the commands ip and tc (Debian: apt install iproute2)")
    prefix = f"innet-{os.getpid()}"
    machines = [f"{prefix}-{number}" for number in range(workers + 1)]
    switch, *switches = f"{prefix}-switch", *(f"{prefix}-rack{rack}" for rack in range(racks))
    with contextlib.ExitStack() as undo:
        for name in (switch, *machines, *switches):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
            _within(name, "ip", "link", "set", "lo", "up")
        _within(switch, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number, machine in enumerate(machines):
            _link(mbit, switch, machine, MACHINE_DEVICE, f"{TO_SWITCH}.{number}")
            _within(machine, "ip", "route", "add", "default", "via", f"{TO_SWITCH}.{number}.1")
            if racks and number < workers:
                _link(mbit, switches[number % racks], machine, "rack", f"{TO_RACK}.{number}")
        for rack, machine in enumerate(switches):
            _link(mbit, switch, machine, MACHINE_DEVICE, f"{RACK_TO_SWITCH}.{rack}")
        yield Links(prefix)


def _link(mbit: int, switch: str, machine: str, device: str, network: str) -> None:
    end = f"to{network[3:]}"
    pair = ("type", "veth", "peer", "name", device, "netns", machine)
    _within(switch, "ip", "link", "add", end, *pair)
    for name, own, address in ((switch, end, f"{network}.1"), (machine, device, f"{network}.2")):
        _within(name, "ip", "address", "add", f"{address}/24", "dev", own)
        _within(name, "ip", "link", "set", own, "up")
        shape = ("rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
        _within(name, "tc", "qdisc", "add", "dev", own, "root", "tbf", *shape)


def within(name: str | None) -> list[str]:
    """Returns the prefix of a command that runs in a namespace; `None` is the current one."""
    return [] if name is None else ["ip", "netns", "exec", name]


def enter(name: str | None) -> None:
    """Moves this thread and its future threads to a namespace; `None` is the current one.

    Raises:
        SystemExit: The permission is missing.
    """
    if name is None:
        return
    with Path("/run/netns", name).open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise SystemExit(f"cannot enter the network namespace {name}: {os.strerror(ctypes.get_errno())}")


def _within(name: str, *command: str) -> None:
    _run(*within(name), *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"--link-mbit: {' '.join(command)}: {done.stderr.strip()}")
