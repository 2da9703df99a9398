"""Files that are complete at any time: written under a temporary name, then renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO


def new_file(path: Path) -> BinaryIO:
    """Makes a temporary file, in place of one that an ended process has left, and opens it for writing.

    A symbolic link in its place is removed, not followed: it might name any file of this user.

    Raises:
        OSError: It cannot be made, or somebody makes another one at the same time.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")


def replaceable(path: Path) -> Path:
    """The file that a new one replaces: `path`, or the target of a symbolic link, which stays.

    Raises:
        OSError: There is no regular file but a folder, a device, a pipe, a socket, or a link to nothing.
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
        OSError: It cannot be renamed, or something other than a regular file is at `path`.
    """
    path = replaceable(path)
    file.replace(path)
    # The new name is in the directory, which is written on its own.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
