"""How far loading is: a bar for each model on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from engine_shim.handoff import catalog
from engine_shim.handoff.room import gib

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("ballast")

LINE_EVERY = 5.0  # seconds between two lines about one model: a loading of minutes stays readable in a container's log


class Lines:
    """One line every few seconds for each model that is being loaded. Called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[float, int]] = {}  # model -> when its last line was, and how many bytes it had then

    def __call__(self, model: str, done: int, total: int, state: str) -> None:
        now = time.monotonic()
        with self._lock:
            if state != catalog.LOADING:
                self._last.pop(model, None)
                return
            then, before = self._last.setdefault(model, (now, done))
            if now - then < LINE_EVERY:
                return
            self._last[model] = (now, done)
        rate = gib(int((done - before) / (now - then)))
        log.info("loading %s: %s of %s (%d %%), %s/s", model, gib(done), gib(total), 100 * done // (total or 1), rate)


class Bars:
    """A bar for each model while it is being loaded, below the log's lines. Called from several threads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._display: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, model: str, done: int, total: int, state: str) -> None:
        with self._lock:
            if state == catalog.LOADING:
                self._update(model, done, total)
            elif model in self._tasks:
                self._display.remove_task(self._tasks.pop(model))
                if not self._tasks:
                    self._display.stop()
                    self._display = None

    def _update(self, model: str, done: int, total: int) -> None:
        if self._display is None:
            from rich import progress

            self._display = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.DownloadColumn(binary_units=True),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._display.start()
        if model not in self._tasks:
            self._tasks[model] = self._display.add_task(model, total=total)
        self._display.update(self._tasks[model], completed=done, total=total)

    def close(self) -> None:
        """Takes the bars away, whatever state they are in."""
        with self._lock:
            if self._display is not None:
                self._display.stop()
                self._display = None
                self._tasks.clear()


class BarsHandler(logging.Handler):
    """Log lines above the bars instead of through them."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def is_terminal(stream: TextIO = sys.stderr) -> bool:
    """Whether a person is looking; False as well where the stream is closed."""
    try:
        return stream.isatty()
    except (AttributeError, ValueError):
        return False
