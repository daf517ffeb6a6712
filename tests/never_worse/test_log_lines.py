"""A line that cannot be written is lost; the load that it is about is not, and nothing is printed in its place."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors

from engine_shim import ladder, safe_open
from engine_shim.safe_open import stand_in
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.bits import everything
from tests.never_wrong.loading import Loading

OURS: Any = stand_in(safetensors.safe_open)


class Refusing:
    """A stream that a program has put in stderr's place, and that fails in a way that nobody thinks of."""

    def write(self, text: str) -> int:
        raise RuntimeError("not written")

    def flush(self) -> None:
        raise RuntimeError("not flushed")


@pytest.fixture
def path(filled: Loading, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    Checkpoint({"a": entry("F32", (100,), 1)}).write(path)
    filled.load(path)
    return path


def configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logging as `configure_logging` leaves it. In the test's body: pytest gives a logger handlers of its own before that."""
    monkeypatch.setattr(ladder.log, "handlers", [])
    ladder.configure_logging()


def said_again(path: Path) -> None:
    """Loads the file from memory, and one that the pool does not hold: two lines."""
    ladder._said.clear()
    with OURS(path, "pt") as file:
        assert type(file) is OURS and everything(file)["names"] == ["a"]
    other = path.with_name("other.safetensors")
    Checkpoint({"b": entry("F32", (7,), 2)}).write(other)
    assert type(OURS(other, "pt")) is safetensors.safe_open


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [closed(), Refusing(), None], ids=["closed", "refusing", "none"])
def test_no_stderr(path: Path, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    configured(monkeypatch)
    said_again(path)


def test_a_stderr_that_was_there_for_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pytest's capsys, in a notebook, and with contextlib.redirect_stderr: each line goes to the present one."""
    configured(monkeypatch)
    for _ in range(2):
        with io.StringIO() as stream:
            with contextlib.redirect_stderr(stream):
                said_again(path)
            said = stream.getvalue().splitlines()
        assert len(said) == 2 and all(line.startswith("ballast: ") for line in said), said


def test_not_even_our_modules_can_be_had(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no handler of ours either, and logging's last resort raises where stderr is closed."""
    monkeypatch.setattr(ladder.log, "handlers", [])
    monkeypatch.setattr(ladder.log.root, "handlers", [])
    monkeypatch.setattr(ladder.log, "propagate", True)
    monkeypatch.setattr(safe_open, "_said", set())
    monkeypatch.setitem(sys.modules, "engine_shim.ladder", None)
    monkeypatch.setattr(sys, "stderr", closed())
    assert type(OURS(path, "pt")) is safetensors.safe_open
