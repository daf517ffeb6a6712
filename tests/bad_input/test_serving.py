"""Bad input to `ballast serve`: one clear sentence, its exit code, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write
from tests.conftest import left_behind
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.processes import Sidecar, ballast

MIB = 1 << 20
LARGE = 24 * MIB  # several units


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "m"
    folder.mkdir()
    write(folder / "model.safetensors", {"t": ("U8", (LARGE,), os.urandom(LARGE))})
    return folder


def no_such_directory(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    folder.rmdir()


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", LARGE // 2)


def corrupt_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(9)
        file.write(b"\xff\xff")


def twice_the_same_name(folder: Path) -> None:
    write(folder / "other.safetensors", {"t": ("U8", (8,), bytes(8))})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (no_such_directory, "does not exist"),
        (only_pickles, "pickled"),
        (truncated, "download"),
        (corrupt_header, "header"),
        (twice_the_same_name, "'t'"),
    ],
)
def test_what_cannot_be_served(
    spoil: Callable[[Path], None], says: str, checkpoint: Path, pool_name: str
) -> None:
    spoil(checkpoint)
    done = ballast("serve", str(checkpoint), "--pool", pool_name)
    assert done.returncode == 1
    why = [line for line in done.stderr.splitlines() if "cannot be loaded" in line]
    assert len(why) == 1 and says.lower() in why[0].lower()
    assert "Traceback" not in done.stderr
    assert left_behind(pool_name) == []


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A memory file system with room for less than the checkpoint."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", place], capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_no_room(checkpoint: Path, pool_name: str, small_tmpfs: Path) -> None:
    """Says what is needed, what is there, and how to enlarge it wherever one may be."""
    done = ballast("serve", str(checkpoint), "--pool", pool_name, "--dir", str(small_tmpfs))
    assert done.returncode == 1
    (why,) = (line for line in done.stderr.splitlines() if "cannot be loaded" in line)
    for part in ("needs 24.00 MiB", "are free", "shm_size", "--shm-size", "sizeLimit"):
        assert part in why, why
    assert list(small_tmpfs.iterdir()) == []
    assert left_behind(pool_name) == []


def test_no_room_for_one_of_two(checkpoint: Path, pool_name: str, small_tmpfs: Path, tmp_path: Path) -> None:
    """The other is served all the same."""
    little = tmp_path / "little"
    little.mkdir()
    write(little / "model.safetensors", {"t": ("U8", (8,), bytes(8))})
    with Sidecar(pool_name, checkpoint, little, directory=small_tmpfs) as sidecar:
        sidecar.ready("little")
        sidecar.ready("m", "failed")
        assert sidecar.process.poll() is None


def shrinks(file: Path) -> None:
    os.truncate(file, LARGE // 2)


def changes(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(LARGE // 2)
        opened.write(b"other")


@pytest.mark.parametrize("happens", [shrinks, changes])
def test_a_file_that_does_not_keep_still(happens: Callable[[Path], None], checkpoint: Path, pool_name: str) -> None:
    file = checkpoint / "model.safetensors"
    hold(file, 8 * MIB)
    with Sidecar(pool_name, checkpoint, env=instrumented(checkpoint.parent, HOLDING)) as sidecar:
        sidecar.ready("m", "loading")
        happens(file)
        release(file)
        assert sidecar.process.wait(30) == 1
        (why,) = (line for line in sidecar.log.splitlines() if "cannot be loaded" in line)
        assert "while it was being read" in why
    assert left_behind(pool_name) == []
