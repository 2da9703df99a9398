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
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Links:
    """A switch and the machines at its links."""

    prefix: str
    """Prefix of the namespaces' names."""
    mbit: int

    @property
    def switch(self) -> str:
        """Namespace of the switch."""
        return f"{self.prefix}-switch"

    def machine(self, number: int) -> str:
        """Namespace of a machine."""
        return f"{self.prefix}-{number}"

    @staticmethod
    def address(number: int) -> str:
        """Address of a machine."""
        return f"10.77.{number}.2"

    @staticmethod
    def switch_address(number: int) -> str:
        """Address of the switch at the link to a machine."""
        return f"10.77.{number}.1"


@contextlib.contextmanager
def links(machines: int, mbit: int) -> Iterator[Links]:
    """Makes machines with links of the given Mbit/s in each direction.

    Raises:
        SystemExit: The links cannot be made: a permission or `iproute2` is missing.
    """
    made = Links(f"innet-{os.getpid()}", mbit)
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("--link-mbit wants the commands ip and tc (Debian: apt install iproute2)")
    with contextlib.ExitStack() as undo:
        for name in (made.switch, *map(made.machine, range(machines))):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "del", name)
            _within(name, "ip", "link", "set", "lo", "up")
        _within(made.switch, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for number in range(machines):
            _link(made, number)
        yield made


def _link(made: Links, number: int) -> None:
    switch, machine, end = made.switch, made.machine(number), f"to{number}"
    pair = ("type", "veth", "peer", "name", MACHINE_DEVICE, "netns", machine)
    _within(switch, "ip", "link", "add", end, *pair)
    ends = ((switch, end, made.switch_address(number)), (machine, MACHINE_DEVICE, made.address(number)))
    for name, device, address in ends:
        _within(name, "ip", "address", "add", f"{address}/24", "dev", device)
        _within(name, "ip", "link", "set", device, "up")
        shape = ("rate", f"{made.mbit}mbit", "burst", BURST, "limit", QUEUE)
        _within(name, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
    _within(machine, "ip", "route", "add", "default", "via", made.switch_address(number))


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
