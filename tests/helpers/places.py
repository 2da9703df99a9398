"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = Path(__file__).parent
"""On the path of every process that finds modules of the tests by name."""
