"""What several modules of this folder need: a cleaner that comes at the worst moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff import posix


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`interrupted("rename")`: once, right before the next rename, a cleaner takes the file away that was made last. Before
    `try_lock_byte` it has the lock as well, as it does while it removes the record of somebody whom it thinks dead."""
    made: list[Path] = []
    to_come: list[str] = []
    create, lock = posix.create, posix.try_lock_byte

    def note(path: Path, *more: Any) -> int:
        made.append(path)
        return create(path, *more)

    monkeypatch.setattr(posix, "create", note)

    def at(step: str) -> None:
        really = getattr(posix, step)
        to_come.append(step)

        def call(*args: Any) -> Any:
            monkeypatch.setattr(posix, step, really)
            to_come.remove(step)
            posix.remove(made[-1])
            return False if really is lock else really(*args)

        monkeypatch.setattr(posix, step, call)

    yield at
    assert not to_come, "nobody came to these steps"
