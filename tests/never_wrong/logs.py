"""What the shim says in this process, line by line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from engine_shim import ladder


class Lines(logging.Handler):
    """Collects the lines of the shim alone: in tests the sidecar's parts may run in the same process."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.module in ("ladder", "safe_open", "bootstrap") and record.levelno >= logging.INFO:
            self.all.append(record.getMessage())

    def take(self) -> list[str]:
        """The lines since the last call; what was said once may be said again from now on."""
        lines, self.all = self.all, []
        ladder._said.clear()
        return lines


@contextmanager
def listening() -> Iterator[Lines]:
    lines = Lines()
    before = ladder.log.handlers[:], ladder.log.level, ladder.log.propagate
    ladder.log.handlers[:] = [lines]
    ladder.log.setLevel(logging.INFO)
    ladder.log.propagate = False
    lines.take()
    try:
        yield lines
    finally:
        ladder.log.handlers[:] = before[0]
        ladder.log.setLevel(before[1])
        ladder.log.propagate = before[2]


def forget_pools() -> None:
    """This process looks at every pool anew."""
    ladder._pools.clear()
