"""The command `innet-replay`: the Rust command line, reached through the wheel, and the commands for data sets."""

import signal
import sys

from innet_drl import _core


def main() -> None:
    """Runs `innet-replay` with the arguments of this process and exits with its status."""
    if sys.argv[1:2] in (["export"], ["import"]):
        from innet_drl.datasets import command
        from innet_drl.signals import end_by

        try:
            sys.exit(command.main(sys.argv[1:]))
        except KeyboardInterrupt as interrupt:
            sys.exit(end_by(interrupt))
    # Rust handles signals. Python's handler would raise KeyboardInterrupt after the call.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_core.run_server_cli(["innet-replay", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
