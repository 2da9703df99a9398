"""Atomic file writes, by a temporary file and a rename."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO


def new_file(path: Path) -> BinaryIO:
    """Creates a temporary file and opens it for writing; replaces a leftover of an ended process.

    A symbolic link at `path` is removed and not followed, as it might name any file of this user.

    Raises:
        OSError: The file cannot be created, or another process creates it at the same time.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")


def replaceable(path: Path) -> Path:
    """Returns the file to replace: `path`, or the target of a symbolic link, which stays.

    Raises:
        OSError: The path is a folder, a device, a pipe, a socket, or a dangling link.
    """
    if path.is_symlink() and not path.exists():
        raise OSError(errno.EEXIST, "it is a symbolic link to nothing", str(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        words = "it is a device, a pipe or a socket, and only a regular file is replaced"
        raise OSError(errno.EEXIST, words, str(path))
    return path.resolve() if path.is_symlink() else path


def put_in_place(file: Path, path: Path) -> None:
    """Renames a complete file to `path`, durably; see `replaceable`.

    Raises:
        OSError: The file cannot be renamed, or `path` is not a regular file: the earlier file stays. Or its name
            cannot be written to the disk: the message says that the new file is in place.
    """
    path = replaceable(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        # Before the rename, so that an error keeps the earlier file.
        _sync(directory)
        file.replace(path)
        try:
            _sync(directory)
        except OSError as error:
            reason = f"{error.strerror}; {path} is complete and in place, but a crash of the machine may lose it"
            raise OSError(error.errno, reason) from error
    finally:
        os.close(directory)


def _sync(directory: int) -> None:
    """Writes a directory's names to the disk. A file system without that, such as FUSE's, refuses it with EINVAL."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
