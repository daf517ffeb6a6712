"""Quantised weights: what SGLang's own daemon refuses. Kept before post-processing, which runs again at each attach.

A CPU has no kernels for them, so no tokens are asked for: SGLang's loading and post-processing run, over stand-ins for the
kernels that repack (kernels.py), and every tensor is compared, after loading and after post-processing. Not yet run on a
device.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ATTACHED, Engines, adopted

from sidecar.parity import compare_trees, read_dumps
from tests.conftest import left_behind
from tests.processes import Sidecar

# What a user's command line would say -> the checkpoint, the arguments.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "per-tensor FP8": ("fp8", {}),
    "block-wise FP8": ("fp8-block", {}),
    "FP8 made of bfloat16 while loading": ("llama", {"quantization": "fp8"}),
    "compressed-tensors, FP8 by channel": ("fp8-channel", {}),
    "compressed-tensors, INT8": ("w8a8", {}),
    "compressed-tensors, 4 bits": ("w4a16", {}),
    "GPTQ by Marlin": ("gptq", {}),
    "AWQ": ("awq", {"quantization": "awq", "dtype": "float16"}),
    "AWQ by Marlin": ("awq", {}),
    "ModelOpt FP8": ("modelopt-fp8", {"quantization": "modelopt_fp8"}),
    "NVFP4 by Marlin": ("nvfp4", {"quantization": "modelopt_fp4", "fp4_gemm_runner_backend": "marlin"}),
}
WAYS = ("disk", "first", "attached")


@dataclass
class Runs:
    logs: dict[str, str]
    dumps: dict[str, dict[str, dict[str, Any]]]
    shared: dict[str, str]  # a digest of the published bytes: after the first start, after the next one


def published(sidecar: Sidecar, number: int) -> str:
    return hashlib.blake2b(sidecar.paths.segment(number, 0).read_bytes()).hexdigest()


@pytest.fixture(scope="module", params=FORMATS)
def runs(
    request: pytest.FixtureRequest, engines: Engines, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    name, args = FORMATS[request.param]
    folder = tmp_path_factory.mktemp("dumps")
    made = Runs({}, {}, {})
    pool = f"t-sglang-{secrets.token_hex(4)}"
    with Sidecar(pool, checkpoints / name) as sidecar:
        sidecar.ready(name)
        for way in WAYS:
            (folder / way).mkdir()
            _, made.logs[way] = engines.run(
                checkpoints / name, pool if way != "disk" else None, {"BALLAST_PARITY": str(folder / way)},
                only="load", kernels=True, args=args,
            )  # fmt: skip
            made.dumps[way] = read_dumps(folder / way)
            if way != "disk":
                made.shared[way] = published(sidecar, adopted(sidecar, 1)[0])
        sidecar.interrupt()
    assert not left_behind(pool)
    yield made


def test_a_quantised_state_attaches_and_every_tensor_is_that_of_the_disk(runs: Runs) -> None:
    assert "published the state of" in runs.logs["first"], runs.logs["first"][-3000:]
    assert ATTACHED in runs.logs["attached"], runs.logs["attached"][-3000:]
    disk = runs.dumps["disk"]
    assert set(disk) == {"target-0-loaded", "target-0-final"}
    for way in WAYS[1:]:
        for stage, dump in disk.items():
            assert compare_trees(dump, runs.dumps[way][stage]) == [], f"{way} {stage}"
    # Post-processing has done something, and what it wrote was the engine's own: the published bytes are as they were.
    assert compare_trees(disk["target-0-loaded"], disk["target-0-final"]) != []
    assert runs.shared["first"] == runs.shared["attached"]
    types = {row[3] for row in disk["target-0-final"]["tensors"]}
    assert types & {"torch.float8_e4m3fn", "torch.int8", "torch.int32", "torch.uint8"}, types
