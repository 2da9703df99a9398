"""Ape-X learns Breakout: actors, replay memory and learner in processes of their own on one machine.

    python examples/breakout_apex.py --minutes 3

Accepts the flags of `innet-drl train`; the default preset is `breakout`; `--help` lists them.
"""

import sys

from innet_drl.cli import run_command, train

# Each actor imports this file again, and must not start a training of its own.
if __name__ == "__main__":
    sys.exit(run_command(train, sys.argv[1:]))
