"""A transformers model's own state, after `.to(bfloat16)`, from the engine that made it to those that come later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.checkpoints import Checkpoint, entry
from tests.processes import Sidecar, environment

PROGRAM = Path(__file__).with_name("publishing.py")


def start(role: str, pool: str) -> subprocess.Popen[str]:
    environ = environment(pool, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), role], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return process


def told(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    ready = process.stdout.readline()
    said, log = process.communicate("go\n", timeout=120)
    assert (ready, process.returncode) == ("ready\n", 0), log
    return json.loads(said)


def test_from_one_engine_to_the_next(pool_name: str, tmp_path: Path) -> None:
    Checkpoint({"x": entry("F32", (5,))}).write(tmp_path / "other.safetensors")
    with Sidecar(pool_name, tmp_path / "other.safetensors") as sidecar:
        sidecar.ready("other")
        publisher, attacher = start("publish", pool_name), start("attach", pool_name)
        published = told(publisher)
        found = told(attacher)
        for tied in ("True", "False"):
            assert bool(published[tied]["ties"]) == (tied == "True")
            for device in ("cpu", "meta"):
                attached = found.pop(f"{tied} {device}")
                assert attached["state"] == published[tied]
                assert all(value.startswith("torch.bfloat16") for value in attached["state"]["state"].values())
                assert attached["mapped"]["parameters"] > 0
                assert attached["mapped"]["in_maps"] > 0.9 * attached["mapped"]["parameters"]  # the tiny are copied
        # Unknown is not equal: with any other key there is no such state, and the module stays as it was.
        assert len(found) == 8
        assert all(value in (["NotFound", True], ["Mismatch", True]) for value in found.values()), found
        assert sidecar.interrupt() == 0
