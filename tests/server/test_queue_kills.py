"""A queue whose readers are killed, and whose server ends and comes back, at random instants."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from calls import Call
from serving import Server, until

import innet_drl as innet

BATCH, ITEMS = 8, 10_000
READERS, KILLS, RESTARTS = 3, 16, 4

READER = """
import sys, time, innet_drl as innet
with innet.connect(sys.argv[1], reconnect_for=600) as replay, open(sys.argv[2], "a", buffering=1) as processed:
    for batch in replay.batches("q", 8, acknowledge=True, prefetch=2, timeout=None):
        time.sleep(0.01)
        print(*batch.number[:, 0], file=processed)
        try:
            batch.acknowledge()
        except innet.errors.LeaseError:
            pass  # Its server has ended: the items come again.
"""


def write(address: str) -> None:
    with innet.connect(address, reconnect_for=600) as replay, replay.writer("q", 1, chunk_steps=4) as writer:
        for number in range(ITEMS):
            writer.append(number=[number], terminated=[False], truncated=[False], timeout=None)


@pytest.mark.slow
def test_no_item_is_lost_and_only_those_of_the_dead_come_again(tmp_path: Path) -> None:
    chance = random.Random(0)
    log = tmp_path / "processed"
    queue = innet.Table.queue("q", {"number": "int64"}, 500, view=innet.Window(0, 0))
    with Server(f"unix://{tmp_path}/socket", "--snapshot", str(tmp_path / "saved")) as server:
        start = [sys.executable, "-c", READER, server.address, str(log)]
        with innet.connect(server.address, tables=[queue], reconnect_for=600) as replay:
            readers = [subprocess.Popen(start) for _ in range(READERS)]
            writing = Call(lambda: write(server.address))
            # Items that may come again: of a reader its batch, of a server those of all readers.
            deaths = [BATCH] * KILLS + [READERS * BATCH] * RESTARTS
            chance.shuffle(deaths)
            for of_readers in deaths:
                before = log.stat().st_size if log.exists() else 0
                until(lambda before=before: log.exists() and log.stat().st_size > before)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 0.5))
                if of_readers > BATCH:
                    server.send(signal.SIGTERM)
                    server.wait()
                    server.start()
                else:
                    victim = chance.randrange(READERS)
                    readers[victim].kill()
                    readers[victim].wait()
                    readers[victim] = subprocess.Popen(start)
            assert writing.ended() is None
            until(lambda: replay.stats()["tables"]["q"]["items"] == 0)
            told = replay.stats()["tables"]["q"]
            for reader in readers:
                reader.kill()
                reader.wait()
    assert (told["evicted_items"], told["evicted_unread_items"]) == (0, 0)
    processed = [int(number) for number in log.read_text().split()]
    assert set(processed) == set(range(ITEMS))
    again = len(processed) - ITEMS
    print(f"{again} items came again after {KILLS} readers and {RESTARTS} servers")
    # Of each that died, the batches that were processed and whose acknowledgement was not.
    assert again <= sum(deaths)
