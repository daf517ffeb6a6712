"""A model's state as its engine made it, from that engine to those that come later: transformers models after `.to(bfloat16)`,
compiled, quantised by torchao, and the network of a diffusers pipeline after fusing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.checkpoints import Checkpoint, entry
from tests.processes import Sidecar, environment

KINDS = ("tied", "untied", "compiled", "quantised", "denoiser")
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
        assert set(published) == set(found) == set(KINDS)
        for kind, there in published.items():
            here = found[kind]
            for device in ("cpu", "meta"):
                attached = here.pop(device)
                assert attached["state"] == there, kind
                if kind == "quantised":
                    assert there["classes"].count("Int8Tensor") == 15
                    assert any("torch.int8" in value for value in there["state"].values())
                    continue
                assert bool(there["ties"]) == (kind in ("tied", "compiled"))
                assert all(value.startswith("torch.bfloat16") for value in there["state"].values())
                assert attached["mapped"]["parameters"] > 0
                # The tiny are copied, and are many in the denoiser.
                share = 0.5 if kind == "denoiser" else 0.9
                assert attached["mapped"]["in_maps"] > share * attached["mapped"]["parameters"]
            # Unknown is not equal: with any other key there is no such state, and the module stays as it was.
            assert len(here) == 4 + (kind == "quantised")
            assert all(value in (["NotFound", True], ["Mismatch", True]) for value in here.values()), here
        assert sidecar.interrupt() == 0
