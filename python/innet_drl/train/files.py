"""Files that are complete at any time: written under a temporary name, then renamed."""

from __future__ import annotations

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


def put_in_place(file: Path, path: Path) -> None:
    """Renames a complete file to `path`, durably.

    Raises:
        OSError: It cannot be renamed.
    """
    file.replace(path)
    # The new name is in the directory, which is written on its own.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
