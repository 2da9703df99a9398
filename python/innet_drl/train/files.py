"""Atomic file writes, by a temporary file and a rename."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from innet_drl.train.errors import ConfigurationError


def check_output(flag: str, path: Path | None, suffixes: Collection[str] = ()) -> None:
    """Checks that a file can be written, before anything is measured. `suffixes` are the allowed ends of its name.

    Raises:
        ConfigurationError: It cannot: the message has the remedy.
    """
    if path is None:
        return
    if suffixes and path.suffix not in suffixes:
        raise ConfigurationError(f"{flag} {path}: its name has to end in {', '.join(suffixes)}")
    if path.is_dir() or not path.parent.is_dir():
        reason = "it is a directory" if path.is_dir() else f"there is no directory {path.parent}: make it first"
        raise ConfigurationError(f"{flag} {path}: {reason}")
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigurationError(f"{flag} {path}: it may not be written: choose another file")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields an empty temporary file, which replaces `path` at the end of the context, unless that raises.

    A symbolic link with the temporary name is removed and not followed, as it might name any file of this user. See
    `replaceable` for one at `path`, and `put_in_place` for what `durable` means.

    Raises:
        OSError: The file cannot be created or renamed, or another process creates it at the same time.
    """
    path = replaceable(path)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.open("xb").close()
    try:
        yield partial
        if durable:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            put_in_place(partial, path)
        else:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


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
