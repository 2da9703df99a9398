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
from collections.abc import Iterator
from pathlib import Path

_PIDFD_GETFD = 438
"""Number of the system call, the same on all processors."""
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _UDP_GRO = 26, 27, 104
_LOAD, _KEEP_IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
"""Offset at which a filter loads a random number (`SKF_AD_OFF + SKF_AD_RANDOM` of linux/filter.h)."""


def lose(share: float | None, process: int) -> None:
    """Drops a share of the datagrams that the open UDP sockets of a process receive; `None` drops none.

    With loss, GRO is off, so that datagrams arrive one by one as from a network. With `None`, GRO is on.

    Args:
        share: Share of the datagrams, 0 to 1.
        process: Number of this process, or of one that this process started.
    """
    program = [
        (_LOAD, 0, 0, _RANDOM),
        (_KEEP_IF_AT_LEAST, 0, 1, int((share or 0.0) * 2**32)),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    for end in _sockets(process):
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


def _sockets(process: int) -> Iterator[socket.socket]:
    """The sockets of a process, as duplicates."""
    system, handle = ctypes.CDLL(None, use_errno=True), os.pidfd_open(process)
    try:
        for path in Path(f"/proc/{process}/fd").iterdir():
            # The descriptor of the listing itself is closed.
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(path.stat().st_mode):
                    number = system.syscall(_PIDFD_GETFD, handle, int(path.name), 0)
                    if number < 0:
                        raise SystemExit(f"datagrams cannot be lost: {os.strerror(ctypes.get_errno())}")
                    yield socket.socket(fileno=number)
    finally:
        os.close(handle)
