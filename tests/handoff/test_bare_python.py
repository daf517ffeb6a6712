"""What an engine's image may lack: posix_ipc and orjson, and in its C library sem_clockwait(3). Everything works without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine_shim.handoff import manifest, semaphores
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.names import PoolPaths
from tests.processes import environment

WITHOUT = {
    "libraries": "for name in ('orjson', 'posix_ipc'): sys.modules[name] = None",
    "sem_clockwait": """
import ctypes
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name.startswith("sem_"):
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Library
""",
}

# Waits for the bell, takes the guard while another has it and while nobody has it, reads a manifest, and tidies up.
USE = """
from pathlib import Path
from engine_shim.handoff import manifest, posix, semaphores
from engine_shim.handoff.catalog import ControlPage
from engine_shim.handoff.errors import Busy
from engine_shim.handoff.names import PoolPaths
paths = PoolPaths(sys.argv[1], Path(sys.argv[2]))
page = ControlPage.create_or_open(paths)
other = ControlPage.open(paths, write=True)
bell, guard = semaphores.Bell(paths, create=True), semaphores.Guard(paths, page.fd, create=True)
began = time.monotonic()
assert not bell.wait(60) and time.monotonic() - began < 10
bell.ring()
assert bell.wait(5) == (semaphores.posix_ipc is not None)
second = semaphores.Guard(paths, other.fd)
with guard.hold(5):
    try:
        with second.hold(0.3):
            raise SystemExit("two at once")
    except Busy:
        pass
with second.hold(5):
    pass
for thing in (bell, guard, second, page, other):
    thing.close()
contents = manifest.read(paths.manifest(1))
assert manifest.decode(manifest.encode(contents), Path("x")) == contents
semaphores.unlink(paths)
print(len(contents.tensors), manifest.orjson is None, semaphores.posix_ipc is None, semaphores._CLOCKWAIT)
"""


@pytest.mark.parametrize("without", WITHOUT)
def test_without(without: str, pool_name: str, tmp_path: Path) -> None:
    paths = PoolPaths(pool_name, tmp_path)
    contents = manifest.Manifest(1, "m", "engine", True, 1.0, "", (4096,), [], engine={"key": "k"})
    manifest.write(contents, paths.manifest(1))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, time\n{WITHOUT[without]}\n{USE}", pool_name, str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    libraries = without == "libraries"
    assert (done.returncode, done.stdout.split()[1:3]) == (0, [str(libraries)] * 2), done.stderr
    if not libraries:
        assert done.stdout.split()[3] == "False"
    page = ControlPage.open(paths)
    assert page.current and manifest.read(paths.manifest(1)) == contents
    page.close()


def test_removing_what_cannot_be_there(pool_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semaphores, "posix_ipc", None)
    semaphores.unlink(PoolPaths(pool_name))
