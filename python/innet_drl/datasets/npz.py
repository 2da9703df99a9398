"""NumPy's npz: one array for each column, over all rows, as `numpy.load` reads it, not compressed.

An array has its number of rows in front, so the columns are collected in files beside the target before they are put
together.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Container, Iterable, Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from innet_drl.datasets import rows
from innet_drl.errors import SchemaError

_READ_BYTES = 32 << 20
_READ_ROWS = 4096
_END_BYTES = 22
"""Of the record that ends a zip file without a comment."""


def write(path: str, blocks: Iterable[rows.Block]) -> None:
    """Writes the rows, and replaces the file once they are complete."""
    folder = os.path.dirname(os.path.abspath(path))
    with tempfile.TemporaryDirectory(prefix=".npz-", dir=folder) as collected, contextlib.ExitStack() as stack:
        files: dict[str, IO[bytes]] = {}
        columns: dict[str, NDArray[Any]] = {}
        count = 0
        for block in blocks:
            for number, (name, array) in enumerate(block.items()):
                if name not in files:
                    files[name] = stack.enter_context(open(os.path.join(collected, str(number)), "w+b"))
                    columns[name] = array[:0]
                files[name].write(np.ascontiguousarray(array).data)
            count += len(block["final"])
        part = os.path.join(collected, "npz")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, file in files.items():
                file.seek(0)
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    header = npy.header_data_from_array_1_0(columns[name])
                    npy.write_array_header_1_0(
                        member, {**header, "fortran_order": False, "shape": (count, *columns[name].shape[1:])}
                    )
                    shutil.copyfileobj(file, member, 1 << 20)
        os.replace(part, path)


def read(path: str, wanted: Container[str] | None) -> Iterator[rows.Block]:
    """The rows of a file, some thousand at a time. `wanted` has the columns to read, `None` all."""
    with zipfile.ZipFile(path) as archive, contextlib.ExitStack() as stack:
        _check_entries(path, archive)
        members = {member.removesuffix(".npy"): member for member in archive.namelist()}
        if not members:
            raise ValueError("it has no arrays")
        columns = {
            name: _Column(path, name, stack.enter_context(archive.open(member)))
            for name, member in members.items()
            if wanted is None or name in wanted
        }
        unread = dict.fromkeys(members, rows.UNREAD)
        counts = {name: column.count for name, column in columns.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"its arrays have different numbers of rows: {counts}")
        count = next(iter(counts.values()), 0)
        row_bytes = sum(column.row_bytes for column in columns.values())
        most = max(1, min(_READ_ROWS, _READ_BYTES // max(1, row_bytes)))
        # A file without rows has a block, too, whose columns are checked.
        for begin in range(0, max(1, count), most):
            size = min(most, count - begin)
            yield unread | {name: column.read(size) for name, column in columns.items()}
        for column in columns.values():
            column.end()


def _check_entries(path: str, archive: zipfile.ZipFile) -> None:
    """Refuses a directory that ends early: `zipfile` stops at a damaged length."""
    with open(path, "rb") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
    count = int.from_bytes(end[10:12], "little")
    if end.startswith(b"PK\5\6") and count not in (len(archive.filelist), 0xFFFF):
        raise ValueError(f"its directory has {len(archive.filelist)} of {count} arrays")


class _Column:
    """An array of the archive, read from its beginning on."""

    def __init__(self, path: str, name: str, member: IO[bytes]) -> None:
        version = npy.read_magic(member)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if header is None:
            raise ValueError(f"array {name!r} has the version {version}")
        shape, fortran, dtype = header(member)
        if not shape:
            raise SchemaError(f"{path}: array {name!r} is a single number: it has a row for each step")
        if fortran and len(shape) > 1:
            raise SchemaError(f"{path}: array {name!r} is in Fortran order: save np.ascontiguousarray of it")
        if dtype.hasobject:
            raise ValueError(f"array {name!r} has Python objects")
        self.count: int = shape[0]
        self._name, self._member, self._shape, self._dtype = name, member, shape[1:], dtype
        self.row_bytes = int(np.prod(self._shape, dtype=np.int64)) * dtype.itemsize

    def read(self, count: int) -> NDArray[Any]:
        data = self._member.read(count * self.row_bytes)
        if len(data) < count * self.row_bytes:
            raise ValueError(f"array {self._name!r} ends early")
        return np.frombuffer(data, self._dtype).reshape(count, *self._shape)

    def end(self) -> None:
        """Has the checksum compared, which is at the end."""
        if self._member.read(1):
            raise ValueError(f"array {self._name!r} has more bytes than its shape")
