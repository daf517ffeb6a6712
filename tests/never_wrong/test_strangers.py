"""What others put into the pool's directory, or take out of it, under a sidecar."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import READY
from tests.checkpoints import write
from tests.processes import Sidecar, ballast

OTHER_USER = 65534


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    write(tmp_path / "m" / "model.safetensors", {"t": ("U8", (5000,), bytes(range(250)) * 20)})
    return tmp_path / "m"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
@pytest.mark.parametrize(
    "rest", ["g7.w0", "g7.manifest", "a.0123456789abcdef", "in.0123456789abcdef", "g999999999999999999.w0"]
)
def test_another_users_object_is_left_alone(pool_name: str, checkpoint: Path, rest: str) -> None:
    """In a directory where anybody may make files, as /dev/shm is."""
    planted = Path(f"/dev/shm/ballast-{pool_name}.{rest}")
    planted.write_bytes(b"x" * 100)
    os.chown(planted, OTHER_USER, OTHER_USER)
    try:
        with Sidecar(pool_name, checkpoint) as sidecar:
            first = sidecar.ready("m")
            assert first.number < 100
            sidecar.terminate()
            assert sidecar.process.returncode == 0
        with Sidecar(pool_name, checkpoint) as sidecar:
            assert sidecar.ready("m").number == first.number  # adopted, planted file or not
    finally:
        planted.unlink(missing_ok=True)
        ballast("purge", "--pool", pool_name, "--force")


def test_a_sidecar_whose_pool_was_wiped_leaves_its_successors_alone(pool_name: str, checkpoint: Path) -> None:
    """Some engines' start scripts empty /dev/shm."""
    with Sidecar(pool_name, checkpoint) as first:
        first.ready("m")
        os.kill(first.pid, signal.SIGSTOP)  # it is to notice only after the second has begun
        for file in Path("/dev/shm").glob(f"ballast-{pool_name}.*"):
            file.unlink()
        with Sidecar(pool_name, checkpoint) as second:
            second.ready("m")
            os.kill(first.pid, signal.SIGCONT)
            first.process.wait(20)
            assert first.process.returncode == 1
            assert "was removed" in first.log
            time.sleep(0.5)
            assert [g.state for g in second.catalog.generations] == [READY]
            assert Path(f"/dev/shm/ballast-{pool_name}.g1.w0").exists()
            assert ballast("verify", "--pool", pool_name).returncode == 0
