"""`ballast verify` finds what is not as it was published, and names it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from engine_shim.handoff import manifest
from engine_shim.handoff.names import PoolPaths
from sidecar import digest
from tests import checkpoints
from tests.cli.conftest import Make
from tests.conftest import left_behind
from tests.processes import Sidecar, ballast


def flip(path: Path, position: int) -> None:
    """Turns one bit of a published object, as a stray write or bad memory does."""
    mode = path.stat().st_mode
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
    os.chmod(path, mode)


def test_intact(served: Sidecar, pool_name: str) -> None:
    for name in (["m"], []):
        done = ballast("verify", *name, "-p", pool_name)
        assert done.returncode == 0
        assert done.stdout.startswith("m, generation 1: 3 tensors are intact (")
    assert [name for name in left_behind(pool_name) if ".a." in name] == []  # its attachment


def test_a_flipped_bit_is_found_and_the_tensor_named(make: Make, pool_name: str, pool_paths: PoolPaths) -> None:
    with Sidecar(pool_name, make("m"), make("n")) as sidecar:
        number = sidecar.ready("m").number
        sidecar.ready("n")
        rows = {row.name: row for row in manifest.read(pool_paths.manifest(number)).tensors}
        flip(pool_paths.segment(number, 0), rows["head.weight"].offset + 17)
        done = ballast("verify", "-p", pool_name)
        assert done.returncode == 1
        assert f"m, generation {number}: head.weight is damaged\n" in done.stdout
        assert "embed.weight" not in done.stdout
        assert "n, generation" in done.stdout and "3 tensors are intact" in done.stdout
        assert (
            done.stderr.startswith(f"ballast: m ({number}) is not as it was published") and done.stderr.count("\n") == 1
        )
        assert ballast("verify", "n", "-p", pool_name).returncode == 0

        flip(pool_paths.segment(number, 0), rows["step"].offset)
        found = json.loads(ballast("verify", "m", "--json", "-p", pool_name).stdout)["generations"]
        assert [(g["model"], g["damaged"], g["intact"]) for g in found] == [("m", ["head.weight", "step"], False)]


def test_every_block_of_a_large_tensor_counts(tmp_path: Path, pool_name: str, pool_paths: PoolPaths) -> None:
    size = 2 * digest.BLOCK + 5
    checkpoints.write(tmp_path / "big.safetensors", {"w": ("U8", (size,), bytes(size))})
    with Sidecar(pool_name, tmp_path / "big.safetensors") as sidecar:
        sidecar.ready("big")
        for position in (0, digest.BLOCK, size - 1):
            flip(pool_paths.segment(1, 0), position)
            assert "w is damaged" in ballast("verify", "-p", pool_name).stdout
            flip(pool_paths.segment(1, 0), position)
            assert ballast("verify", "-p", pool_name).returncode == 0


def test_no_bit_of_a_segment_is_left_out(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    """Not even where no tensor lies: what flips there is as much a fault of memory, or somebody's doing."""
    flip(pool_paths.segment(1, 0), pool_paths.segment(1, 0).stat().st_size - 1)
    done = ballast("verify", "-p", pool_name)
    assert done.returncode == 1 and "of segment 0, where no tensor lies, is damaged" in done.stdout


def test_a_damaged_manifest_is_found(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    path = pool_paths.manifest(1)
    flip(path, path.stat().st_size // 2)
    done = ballast("verify", "-p", pool_name)
    assert done.returncode == 1
    assert "fails its checksum" in done.stdout
    assert ballast("manifest", "m", "-p", pool_name).returncode == 1


def test_a_missing_or_short_segment_is_found(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    path = pool_paths.segment(1, 0)
    os.chmod(path, 0o600)
    os.truncate(path, 100)
    assert "is shorter than its manifest says" in ballast("verify", "-p", pool_name).stdout
    path.unlink()
    done = ballast("verify", "-p", pool_name)
    assert done.returncode == 1
    assert "is not there" in done.stdout


def test_nothing_to_verify(served: Sidecar, pool_name: str) -> None:
    done = ballast("verify", "other", "-p", pool_name)
    assert done.returncode == 3
    assert "(it holds m)" in done.stderr


def test_without_a_sidecar_too(served: Sidecar, pool_name: str) -> None:
    served.kill()
    time.sleep(0.1)
    assert ballast("verify", "-p", pool_name).returncode == 0
    assert ballast("purge", "-p", pool_name).returncode == 0
