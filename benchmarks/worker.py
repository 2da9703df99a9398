"""A task in a process of its own: `python -m benchmarks.worker DESCRIPTOR SYSTEM TASK SETTINGS`.

The descriptor is one end of a socket pair over which JSON lines go: "check" and "measure" come in, an answer or an
`error` goes out; when the other end closes, the task ends. Standard output is not used, because peers print to it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import sys
import traceback

from benchmarks.tasks import TASKS


def main() -> None:
    """Serves until it is told to close."""
    descriptor, system, task, settings = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rw") as lines:

        def answer(**what: object) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        try:
            module = importlib.import_module(f"benchmarks.systems.{system}")
            running = TASKS[task](module, **json.loads(settings))
            with contextlib.closing(running):
                answer(version=module.VERSION)
                for line in lines:
                    request = json.loads(line)
                    if request["do"] == "check":
                        running.check()
                        answer(checked=True)
                    else:
                        answer(**running.measure(request["seconds"]))
        except Exception as failure:
            traceback.print_exc()
            answer(error=f"{type(failure).__name__}: {failure}")


if __name__ == "__main__":
    main()
