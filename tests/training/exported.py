"""Exports a run in a process of its own, and prints by how many bytes of memory that process grew at most.

``python -m tests.training.exported RUN DST SMALL``, where SMALL is a run of a small model that is exported first, so
that libraries have taken what they take. What is read and written at a time is a tenth of a model here, as it is of one
that is large. Pages of files do not count: the system takes them back when it needs them. Only Linux tells.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from siamesenorm.training import engine, form
from siamesenorm.training.export import export
from tests.training.measured import resident


def main(run: str, out: str, small: str) -> None:
    torch.set_num_threads(1)
    engine._AT_ONCE = 8_000_000
    form._FILE = "8MB"
    export(Path(small), Path(out).with_name("small-model"))
    done = threading.Event()
    before = resident("RssAnon")
    most = [before]

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], resident("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    export(Path(run), Path(out))
    done.set()
    watcher.join()
    print("grew by", most[0] - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
