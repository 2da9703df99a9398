"""Commands as processes of their own, whose output a test reads while they run, on other hosts where there are any."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from serving import until


class Command:
    """`innet-drl` with some arguments, in a process and a session of its own.

    Args:
        arguments: Arguments of the command.
        folder: Its working directory.
        inside: A command that it is run by.
    """

    def __init__(self, *arguments: str, folder: Path, inside: Sequence[str] = ()) -> None:
        self._arguments = arguments
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-m", "innet_drl", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.kill()
        if kind is not None:
            print(f"--- innet-drl {' '.join(self._arguments)}\n{self.output}")

    @property
    def output(self) -> str:
        """Everything that it has printed."""
        return "".join(self._lines)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def await_line(self, text: str, times: int = 1) -> None:
        """Returns when it has printed some text so many times."""
        until(lambda: self.output.count(text) >= times or not self.runs)
        assert self.output.count(text) >= times, self.output

    def end(self) -> int:
        """Waits for its end, and returns its exit status."""
        status = self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def kill(self) -> None:
        """Ends it at once, if it runs."""
        self._process.kill()
        self.end()

    def interrupt(self) -> int:
        """Ends it as Ctrl-C in a terminal, and returns its exit status."""
        self._process.send_signal(signal.SIGINT)
        return self.end()


def namespaces_missing() -> str | None:
    """The reason why there are no other hosts here: network namespaces, joined by a pair of veth interfaces."""
    try:
        made = ["unshare", "--net", "ip", "link", "add", "name", "v1", "type", "veth", "peer", "name", "v2"]
        done = subprocess.run(made, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return None if done.returncode == 0 else f"no veth pair can be made: {done.stderr.strip()}"
