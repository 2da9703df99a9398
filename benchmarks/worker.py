"""A worker process with one task: `python -m benchmarks.worker DESCRIPTOR SYSTEM TASK SETTINGS`.

The descriptor is one end of a socket pair for JSON lines: requests "check" and "measure", each answered by a result or
an `error`. The task ends at end of file. Standard output is not used, because peers print to it.
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
    """Answers requests until the connection is closed."""
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
