"""`ballast status` and `ballast manifest`: what is there, for people and for programs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from engine_shim.handoff import posix
from engine_shim.handoff.attachment import Token
from engine_shim.handoff.names import PoolPaths
from tests.cli.conftest import NBYTES, TENSORS, Make
from tests.processes import Sidecar, ballast, environment


def status(pool: str) -> Any:
    (found,) = json.loads(ballast("status", "--json", "-p", pool).stdout)["pools"]
    return found


def test_json_of_a_pool(served: Sidecar, pool_name: str) -> None:
    now = time.time()
    found = status(pool_name)
    since = found["generations"][0].pop("since")
    assert now - 60 < since < now
    assert found.pop("room") > 0
    assert NBYTES <= found.pop("bytes") < NBYTES + (4 << 20)
    assert found == {
        "pool": pool_name,
        "dir": "/dev/shm",
        "sidecar": {"alive": True, "boot": served.catalog.boot},
        "problem": None,
        "generations": [
            {
                "model": "m", "generation": 1, "kind": "checkpoint", "state": "ready", "bytes": NBYTES, "bytes_done": NBYTES,
                "reason": None, "key": None, "evicted": False, "attachments": 0, "devices": {},
            }
        ],
        "attachments": [],
        "leftovers": [],
    }  # fmt: skip


def test_table_of_a_pool(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    token = Token.take(pool_paths, 1, "m", "vllm \x1b[2J", rank=3)
    try:
        done = ballast("status", "-p", pool_name)
    finally:
        token.release()
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"pool {pool_name} in /dev/shm") and lines[0].endswith("sidecar alive")
    assert next(line for line in lines if line.startswith("m  ")).split()[:4] == ["m", "1", "checkpoint", "ready"]
    assert r"vllm \x1b[2J" in done.stdout and "\x1b" not in done.stdout
    assert str(os.getpid()) in done.stdout


def test_all_pools_unless_one_is_named(make: Make, pool_name: str, served: Sidecar) -> None:
    other = f"{pool_name}-b"
    with Sidecar(other, make("n")) as sidecar:
        sidecar.ready("n")
        found = json.loads(ballast("status", "--json").stdout)
        assert {pool_name, other} <= {pool["pool"] for pool in found["pools"]}
        only = json.loads(ballast("status", "--json", env=environment(other)).stdout)
        assert [pool["pool"] for pool in only["pools"]] == [other]


def test_no_pools_at_all(tmp_path: Path) -> None:
    done = ballast("status", "--dir", tmp_path)
    assert (done.returncode, done.stdout.startswith("no pool in")) == (0, True)
    assert json.loads(ballast("status", "--dir", tmp_path, "--json").stdout)["pools"] == []


def test_a_failed_model_has_its_reason(make: Make, tmp_path: Path, pool_name: str) -> None:
    with Sidecar(pool_name, make("m"), tmp_path / "nowhere") as sidecar:
        sidecar.ready("m")
        states = {g["model"]: (g["state"], g["reason"]) for g in status(pool_name)["generations"]}
        assert states["m"] == ("ready", None)
        assert states["nowhere"][0] == "failed" and "does not exist" in states["nowhere"][1]
        assert "does not exist" in ballast("status", "-p", pool_name).stdout


def test_what_killed_processes_left(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    served.kill()
    token = Token.take(pool_paths, 1, "m")
    dead = pool_paths.attachment("0" * 16)
    dead.write_bytes(pool_paths.attachment(token.record.identifier).read_bytes())
    os.chmod(dead, posix.PRIVATE)
    unlisted = pool_paths.segment(77, 0)
    unlisted.write_bytes(bytes(8192))
    unfinished = pool_paths.path("g1.w5.tmp")
    unfinished.write_bytes(bytes(4096))

    found = status(pool_name)
    assert found["sidecar"]["alive"] is False
    assert {left["name"]: (left["bytes"], left["why"]) for left in found["leftovers"]} == {
        dead.name: (4096, "the record of an engine that is gone"),
        unlisted.name: (8192, "of a generation that the catalog does not list"),
        unfinished.name: (4096, "unfinished, and nothing is being loaded"),
    }
    assert [record["pid"] for record in found["attachments"]] == [os.getpid()]
    table = ballast("status", "-p", pool_name).stdout
    assert "no sidecar" in table and f"left over: {unlisted.name}" in table

    token.release()
    checkpoint = found["generations"][0]["model"]
    with Sidecar(pool_name, "/nowhere", args=["--name", checkpoint]) as successor:
        successor.ready("m")
        assert status(pool_name)["leftovers"] == []


def test_a_damaged_control_page_is_said(served: Sidecar, pool_name: str, pool_paths: PoolPaths) -> None:
    served.kill()
    pool_paths.control.write_bytes(b"not a control page")
    found = status(pool_name)
    assert "has 18 bytes" in found["problem"]
    assert found["generations"] == []
    assert "has 18 bytes" in ballast("status", "-p", pool_name).stdout
    assert ballast("purge", "-p", pool_name).returncode == 0


def test_manifest_lists_every_tensor(served: Sidecar, pool_name: str) -> None:
    found = json.loads(ballast("manifest", "m", "--json", "-p", pool_name).stdout)
    assert (found["model"], found["generation"], found["kind"], found["complete"]) == ("m", 1, "checkpoint", True)
    assert {row["name"]: (row["dtype"], tuple(row["shape"]), row["bytes"]) for row in found["tensors"]} == {
        name: (dtype, shape, len(data)) for name, (dtype, shape, data) in TENSORS.items()
    }
    assert all(row["offset"] % 256 == 0 and len(row["digest"]) == 32 for row in found["tensors"])
    (shard,) = found["shards"]
    assert (shard["name"], shard["metadata"], shard["tensors"]) == (
        "model.safetensors",
        {"format": "pt"},
        list(TENSORS),
    )
    assert list(found["config"]) == ["config.json"]

    lines = ballast("manifest", "m", "-p", pool_name).stdout.splitlines()
    assert lines[0].startswith("m, generation 1, checkpoint, from /")
    assert lines[3].split() == ["tensor", "dtype", "shape", "segment", "offset", "bytes", "digest"]
    assert [line.split()[:4] for line in lines[4:]] == [
        ["embed.weight", "BF16", "64x32", "w0"], ["head.weight", "F32", "16x8", "w0"], ["step", "I64", "scalar", "w0"],
    ]  # fmt: skip


def test_manifest_of_a_generation(served: Sidecar, pool_name: str) -> None:
    assert ballast("manifest", "m", "-g", "1", "-p", pool_name).returncode == 0
    done = ballast("manifest", "m", "-g", "2", "-p", pool_name)
    assert done.returncode == 3
    assert "does not hold generation 2 of 'm': it holds m (1)" in done.stderr
    assert ballast("manifest", "n", "-p", pool_name).returncode == 3
