"""The command `innet-replay`: the Rust command line, reached through the wheel."""

import signal
import sys

from innet_drl import _core


def main() -> None:
    """Runs `innet-replay` with the arguments of this process and exits with its status."""
    # Rust handles signals. Python's handler would raise KeyboardInterrupt after the call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_core.run_server_cli(["innet-replay", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
