"""A full disk, for files that are opened without following links."""

import os
import stat
from pathlib import Path

import pytest


def full_device(path: Path) -> None:
    """Makes `path` the device /dev/full: writing to it fails as writing to a full disk does."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.stat("/dev/full").st_rdev)
    except PermissionError:
        pytest.skip("devices are made by root alone")
