"""Starts that go as they should, and starts in which something is wrong: the tokens are right, always."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
from conftest import Engine, run

from engine_shim.handoff import attachment, manifest
from engine_shim.handoff.catalog import ENGINE, READY
from engine_shim.handoff.names import PoolPaths
from tests.conftest import left_behind
from tests.processes import ROOT, Sidecar

MODEL = "qwen2"
ATTACHED = "comes from memory as it was after loading"


def states(paths: PoolPaths, sidecar: Sidecar) -> list[int]:
    return [g.number for g in sidecar.catalog.generations if g.kind == ENGINE and g.state == READY]


def adopted(paths: PoolPaths, sidecar: Sidecar, count: int) -> list[int]:
    deadline = time.monotonic() + 30
    while len(found := states(paths, sidecar)) < count:
        assert time.monotonic() < deadline, sidecar.log
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def disk(checkpoints: Path) -> list[list[int]]:
    """The right tokens."""
    results, _ = run([{"model": str(checkpoints / MODEL)}])
    tokens: list[list[int]] = results[0]["tokens"]
    return tokens


@pytest.fixture
def served(checkpoints: Path, tmp_path: Path) -> Iterator[tuple[Path, PoolPaths, Sidecar]]:
    """A checkpoint of the test's own, and a sidecar that serves it."""
    model = tmp_path / MODEL
    shutil.copytree(checkpoints / MODEL, model)
    pool = f"t-vllm-{secrets.token_hex(4)}"
    paths = PoolPaths(pool)
    with Sidecar(pool, model) as sidecar:
        sidecar.ready(MODEL)
        yield model, paths, sidecar
        sidecar.interrupt()
    assert not left_behind(pool)


def test_killed_engines_and_engines_side_by_side(
    served: tuple[Path, PoolPaths, Sidecar], disk: list[list[int]]
) -> None:
    model, paths, sidecar = served
    hang = [{"model": str(model), "then": "hang"}]
    with Engine(hang, paths.pool) as first:
        assert first.ready()["tokens"] == disk
        number = adopted(paths, sidecar, 1)[0]
        first.kill()
    with Engine(hang, paths.pool) as second:
        assert second.ready()["tokens"] == disk
        assert ATTACHED in second.log
        held = [record for record in attachment.alive(paths) if record.generation == number]
        assert [record.pid for record in held] == [second.process.pid]
        results, logs = run([{"model": str(model)}, {"model": str(model), "reload": True}], paths.pool)
        assert [result["tokens"] for result in results] == [disk, disk]
        assert results[1]["reloaded"] == disk
        assert all(ATTACHED in log for log in logs)
        second.kill()
    # A restarted sidecar takes the state over, without an engine and without the disk.
    sidecar.kill()
    with Sidecar(paths.pool, model) as successor:
        successor.ready(MODEL)
        results, logs = run([{"model": str(model)}], paths.pool)
        assert results[0]["tokens"] == disk and ATTACHED in logs[0]
        successor.interrupt()


def test_the_plugin_alone_is_enough(
    served: tuple[Path, PoolPaths, Sidecar], disk: list[list[int]], tmp_path: Path
) -> None:
    """Without the start-up hook: vLLM finds us among its plugins."""
    model, paths, sidecar = served
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    metadata = tmp_path / "site" / "ballast_plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ballast-plugin\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    environ = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    results, logs = run([{"model": str(model)}], paths.pool, **environ)
    assert results[0]["tokens"] == disk
    adopted(paths, sidecar, 1)
    results, logs = run([{"model": str(model)}], paths.pool, **environ)
    assert results[0]["tokens"] == disk and ATTACHED in logs[0]


SABOTAGE = {
    # where it raises -> what the log must say
    "engine_shim.hooks.vllm:key": "the state of",
    "engine_shim.state:find": "the state of",
    "engine_shim.state:Found.bind": "is not used: RuntimeError: sabotage",
    "engine_shim.state:Found.check_final": "is not used: RuntimeError: sabotage",
    "engine_shim.state:Keeper.move": "is not published: sabotage",
    "engine_shim.state:Keeper.loaded": "is not published: sabotage",
    "engine_shim.state:Keeper.finish": "is not published: sabotage",
    "engine_shim.handoff.publication:Publication.commit": "is not published: sabotage",
}


def test_faults_of_ours_leave_a_working_engine(
    served: tuple[Path, PoolPaths, Sidecar], disk: list[list[int]]
) -> None:
    model, paths, sidecar = served
    run([{"model": str(model)}], paths.pool)
    adopted(paths, sidecar, 1)
    jobs: list[dict[str, Any]] = []
    for place in SABOTAGE:
        environ = {"BALLAST_STATE": "0"} if "Keeper" in place or "Publication" in place else {"BALLAST_PUBLISH": "0"}
        jobs.append({"model": str(model), "sabotage": place, "env": environ})
    results, logs = run(jobs, paths.pool)
    for (place, line), result, log in zip(SABOTAGE.items(), results, logs, strict=True):
        assert result["tokens"] == disk, place
        assert line in log and "sabotage" in log, f"{place}: {log[-3000:]}"


def test_with_require_a_fault_of_ours_ends_the_start(
    served: tuple[Path, PoolPaths, Sidecar], disk: list[list[int]]
) -> None:
    model, paths, sidecar = served
    run([{"model": str(model)}], paths.pool)
    adopted(paths, sidecar, 1)
    require = {"BALLAST_MODE": "require"}
    jobs: list[dict[str, Any]] = [
        {"model": str(model), "env": require},
        {"model": str(model), "env": require, "sabotage": "engine_shim.state:Found.check_final", "fails": True},
        {"model": str(model), "env": {**require, "BALLAST_STATE": "0"}},
    ]
    results, logs = run(jobs, paths.pool)
    assert results[0]["tokens"] == disk and ATTACHED in logs[0]
    assert "BALLAST_MODE=require" in results[1]["error"], results[1]
    assert results[2]["tokens"] == disk, "the checkpoint's tensors from memory are Ballast as well"


def test_what_is_damaged_or_other_is_not_used(served: tuple[Path, PoolPaths, Sidecar], disk: list[list[int]]) -> None:
    model, paths, sidecar = served
    run([{"model": str(model)}], paths.pool)
    number = adopted(paths, sidecar, 1)[0]
    segment = paths.segment(number, 0)
    whole = segment.read_bytes()
    contents = paths.manifest(number).read_bytes()

    def replace(path: Path, data: bytes) -> None:
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o400)

    quiet = {"BALLAST_PUBLISH": "0"}
    replace(segment, whole[: len(whole) // 2])
    results, logs = run([{"model": str(model), "env": quiet}], paths.pool)
    assert results[0]["tokens"] == disk and ATTACHED not in logs[0]
    assert "is shorter than its manifest says" in logs[0], logs[0][-3000:]
    replace(segment, whole)

    newer = bytearray(contents)
    newer[8] = manifest.FORMAT + 1
    replace(paths.manifest(number), bytes(newer))
    results, logs = run([{"model": str(model), "env": quiet}], paths.pool)
    assert results[0]["tokens"] == disk and ATTACHED not in logs[0]
    assert "has format 2 and this Ballast reads format 1" in logs[0], logs[0][-3000:]
    replace(paths.manifest(number), contents)

    # A fine-tune at the same place: the same names, sizes and headers. And other configurations of the same.
    shard = sorted(model.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    for index in range(len(data) - 20001, len(data), 2):
        data[index] ^= 0x10
    jobs: list[dict[str, Any]] = [
        {"model": str(model), "args": {"dtype": "float32"}, "env": quiet},
        {"model": str(model), "args": {"hf_overrides": {"rms_norm_eps": 0.01}}, "env": quiet},
    ]
    results, logs = run(jobs, paths.pool)
    right, _ = run([{key: value for key, value in job.items() if key != "env"} for job in jobs])
    for result, there, log in zip(results, right, logs, strict=True):
        assert result["tokens"] == there["tokens"]
        assert "holds no state of" in log and "the nearest one differs in" in log, log[-3000:]
    shard.unlink()
    shard.write_bytes(data)
    tuned, logs = run([{"model": str(model), "env": {**quiet, "BALLAST_WAIT": "0"}}], paths.pool)
    there, _ = run([{"model": str(model)}])
    assert tuned[0]["tokens"] == there[0]["tokens"] != disk
    assert ATTACHED not in logs[0]


def test_without_packing_everything_runs_on_the_shared_bytes(served: tuple[Path, PoolPaths, Sidecar]) -> None:
    model, paths, sidecar = served
    environ = {"BALLAST_VLLM_ZERO_COPY": "1"}
    jobs: list[dict[str, Any]] = [{"model": str(model), "env": environ}]
    first, _ = run(jobs, paths.pool)
    adopted(paths, sidecar, 1)
    jobs = [{"model": str(model), "env": environ}, {"model": str(model)}]
    results, logs = run(jobs, paths.pool)
    assert results[0]["tokens"] == first[0]["tokens"]
    assert "used where it lies, without packing" in logs[0]
    assert ATTACHED in logs[1], "what was captured before packing serves an engine that packs as well"
    assert json.dumps(results[1]["tokens"])
