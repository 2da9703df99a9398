"""A wire between two network namespaces that loses, doubles and reorders datagrams: `unshare --net lossy_wire.py RATE`.

Of two veth pairs one end each is in a namespace of its own, `near` (10.77.0.1) and `far` (10.77.0.2). The other ends
are here, where frames are carried from one to the other as they are. A datagram of UDP is lost with the given rate,
doubled with the same, and held back for up to 3 ms with the same. The first line of output has the processes that hold
the namespaces; at the end of standard input it prints what it has done, as one JSON object.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import json
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ENDS = {"near": "10.77.0.1", "far": "10.77.0.2"}
ETH_P_ALL = 3
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
EXPEDITED_FORWARDING = 46


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def compute_checksums(interface: str) -> None:
    """Leaves no checksum to a network card that is not there: here frames are seen before they would get one."""
    value = array.array("B", struct.pack("II", ETHTOOL_STXCSUM, 0))
    request = struct.pack("16sP16x", interface.encode(), value.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


def hold_namespace() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own."""
    here = Path("/proc/self/ns/net").readlink()
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    while Path(f"/proc/{holder.pid}/ns/net").readlink() == here:
        assert holder.poll() is None, "no network namespace"
        time.sleep(0.001)
    return holder


def make_end(name: str, address: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    holder = hold_namespace()
    ip("link", "add", "name", name, "type", "veth", "peer", "name", f"to_{name}")
    compute_checksums(name)
    ip("link", "set", name, "netns", str(holder.pid))
    inside = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "ip"]
    for arguments in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address}/24", "dev", name],
        ["link", "set", name, "up"],
    ):
        subprocess.run([*inside, *arguments], check=True)
    ip("link", "set", f"to_{name}", "up")
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
    wire.bind((f"to_{name}", ETH_P_ALL))
    return holder, wire


class Wire:
    """Frames on their way."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        self.rate = rate
        self.chance = random.Random(seed).random
        self.counts: Counter[str] = Counter()
        self.held: list[tuple[float, int, socket.socket, bytes]] = []

    def carry(self, frame: bytes, to: socket.socket) -> None:
        if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_UDP:
            to.send(frame)
            return
        marked = frame[15] >> 2 == EXPEDITED_FORWARDING
        self.counts["marked" if marked else "unmarked"] += 1
        if self.chance() < self.rate:
            self.counts["lost"] += 1
            return
        if self.chance() < self.rate:
            self.counts["doubled"] += 1
            self.hold(frame, to)
        if self.chance() < self.rate:
            self.counts["held_back"] += 1
            self.hold(frame, to)
        else:
            to.send(frame)

    def hold(self, frame: bytes, to: socket.socket) -> None:
        due = time.monotonic() + 0.003 * self.chance()
        heapq.heappush(self.held, (due, self.counts.total(), to, frame))

    def release(self) -> float | None:
        """Sends what is due, and says how long until the next is."""
        while self.held:
            left = self.held[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, to, frame = heapq.heappop(self.held)
            to.send(frame)
        return None


def main() -> None:
    wire = Wire(float(sys.argv[1]))
    holders, sockets = zip(*(make_end(*end) for end in ENDS.items()), strict=True)
    print(*(holder.pid for holder in holders), flush=True)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    for one, other in (sockets, sockets[::-1]):
        selector.register(one, selectors.EVENT_READ, other)
    while True:
        for key, _ in selector.select(wire.release()):
            if key.fileobj is sys.stdin:
                for holder in holders:
                    holder.kill()
                    holder.wait()
                print(json.dumps(wire.counts), flush=True)
                return
            assert isinstance(key.fileobj, socket.socket)
            frame, (_, _, kind, *_) = key.fileobj.recvfrom(65536)
            if kind != socket.PACKET_OUTGOING:
                wire.carry(frame, key.data)


if __name__ == "__main__":
    main()
