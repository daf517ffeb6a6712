"""A sidecar that stops, or dies, at a point that a test has chosen.

The sidecar runs unchanged but for a `sitecustomize` in its environment, which wraps a function of it before it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import ROOT

# Reading a file waits while `<file>.hold` exists, from the byte on that is written in it.
HOLDING = """
import os, time
import sidecar.loader

read = sidecar.loader._read

def held(fd, buffer, position, *more):
    hold = os.readlink(f"/proc/self/fd/{fd}") + ".hold"
    while True:
        try:
            with open(hold) as file:
                if position < int(file.read() or 0):
                    break
        except FileNotFoundError:
            break
        time.sleep(0.005)
    return read(fd, buffer, position, *more)

sidecar.loader._read = held
"""


def instrumented(folder: Path, code: str) -> dict[str, str]:
    """The environment of a sidecar that runs `code` first."""
    place = folder / "instrumented"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}"}


def hold(path: Path, position: int = 0) -> None:
    """From now on nothing of this file is read beyond `position`, by a sidecar that is HOLDING."""
    new = path.with_name(path.name + ".hold.new")
    new.write_text(str(position))
    os.rename(new, path.with_name(path.name + ".hold"))


def release(path: Path) -> None:
    path.with_name(path.name + ".hold").unlink()
