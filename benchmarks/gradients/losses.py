"""Datagram loss in the kernel: a BPF filter on each UDP socket drops datagrams at random.

A relay would take more time for a datagram than both ends, and hide the cost of a loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import sys
import threading
from collections.abc import Iterator

from innet_drl import server_cli

_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _UDP_GRO = 26, 27, 104
_LOAD, _KEEP_IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
"""Offset at which a filter loads a random number (`SKF_AD_OFF + SKF_AD_RANDOM` of linux/filter.h)."""


def lose(share: float | None) -> None:
    """Drops a share of the datagrams that the open UDP sockets of this process receive; `None` drops none.

    With loss, GRO is off, so that datagrams arrive one by one as from a network. With `None`, GRO is on.
    """
    program = [
        (_LOAD, 0, 0, _RANDOM),
        (_KEEP_IF_AT_LEAST, 0, 1, int((share or 0.0) * 2**32)),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    for end in _sockets():
        with end:
            if end.type != socket.SOCK_DGRAM or end.family == socket.AF_UNIX:
                continue
            end.setsockopt(socket.SOL_UDP, _UDP_GRO, share is None)
            if share is not None:
                pointed = struct.pack("@HP", len(program), ctypes.addressof(code))
                end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointed)
            else:
                # The socket may have no filter.
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _sockets() -> Iterator[socket.socket]:
    """The sockets of this process, as duplicates."""
    for number in map(int, os.listdir("/proc/self/fd")):
        # The descriptor of the listing itself is closed.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                yield socket.socket(fileno=os.dup(number))


def main() -> None:
    """Runs `innet-replay`; applies `lose` to each line of the input, a share or `None`, and confirms it."""

    def obey() -> None:
        for line in sys.stdin:
            lose(None if line.strip() == "None" else float(line))
            print("losing", flush=True)

    threading.Thread(target=obey, daemon=True).start()
    server_cli.main()
