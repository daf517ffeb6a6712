"""Starts that go as they should, and starts in which something is wrong: the tokens are right, always."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
QUIET = {"BALLAST_PUBLISH": "0"}
Answer = tuple[dict[str, Any], str]


@dataclass
class Served:
    """A checkpoint of these tests' own, a sidecar that serves it, and an engine for jobs that need no process of their own."""

    model: Path
    paths: PoolPaths
    sidecar: Sidecar
    engine: Engine
    disk: list[list[int]] = field(default_factory=list)  # the right tokens

    def start(self, **more: Any) -> Answer:
        """One start of the engine: its answer, and its log."""
        results, logs = self.engine.do({"model": str(self.model), **more})
        return results[0], logs[0]

    def states(self, count: int) -> list[int]:
        """The generations of engine state, once there are so many."""
        deadline = time.monotonic() + 30
        while True:
            found = [g.number for g in self.sidecar.catalog.generations if g.kind == ENGINE and g.state == READY]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, self.sidecar.log
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("served") / MODEL
    shutil.copytree(checkpoints / MODEL, model)
    pool = f"t-vllm-{secrets.token_hex(4)}"
    with Engine([], pool) as engine:
        made = Served(model, PoolPaths(pool), Sidecar(pool, model), engine)
        try:
            made.sidecar.ready(MODEL)
            made.disk = made.start(env={"BALLAST_MODE": "off"})[0]["tokens"]
            result, log = made.start()
            assert result["tokens"] == made.disk and ATTACHED not in log
            made.states(1)
            yield made
            engine.finish()
        finally:
            made.sidecar.interrupt()
    assert not left_behind(pool)


def test_killed_engines_and_engines_side_by_side(served: Served) -> None:
    number = served.states(1)[0]
    with Engine([{"model": str(served.model), "until": "/never"}], served.paths.pool) as killed:
        assert killed.ready()["tokens"] == served.disk
        assert ATTACHED in killed.log
        held = [record for record in attachment.alive(served.paths) if record.generation == number]
        assert killed.process.pid in [record.pid for record in held]
        for reload in (False, True):
            result, log = served.start(reload=reload)
            assert result["tokens"] == served.disk and ATTACHED in log
            assert not reload or result["reloaded"] == served.disk
        killed.kill()
    result, log = served.start()
    assert result["tokens"] == served.disk and ATTACHED in log


def test_the_plugin_alone_is_enough(served: Served, tmp_path: Path) -> None:
    """Without the start-up hook: vLLM finds us among its plugins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "vllm.general_plugins"
    metadata = tmp_path / "site" / "ballast_plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ballast-plugin\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    results, logs = run([{"model": str(served.model)}], served.paths.pool, PYTHONPATH=f"{tmp_path / 'site'}:{ROOT}")
    assert results[0]["tokens"] == served.disk and ATTACHED in logs[0]


SABOTAGE = {
    # where it raises -> what the log must say
    "engine_shim.hooks.vllm:key": "the state of",
    "engine_shim.state:find": "",  # the same sentence again, which is said once in a process
    "engine_shim.state:Found.bind": "is not used: RuntimeError: sabotage",
    "engine_shim.state:Found.check_final": "",  # and here
    "engine_shim.state:Keeper.move": "is not published: sabotage",
    "engine_shim.state:Keeper.loaded": "is not published: sabotage",
    "engine_shim.state:Keeper.finish": "is not published: sabotage",
    "engine_shim.handoff.publication:Publication.commit": "is not published: sabotage",
}


@pytest.mark.parametrize("place", SABOTAGE)
def test_a_fault_of_ours_leaves_a_working_engine(served: Served, place: str) -> None:
    if "Keeper" in place or "Publication" in place:  # a configuration whose state is not there yet, of the same answers
        result, log = served.start(sabotage=place, args={"max_model_len": 100 + list(SABOTAGE).index(place)})
    else:
        result, log = served.start(sabotage=place, env=QUIET)
    assert result["tokens"] == served.disk
    assert SABOTAGE[place] in log and "sabotage" in log, log[-3000:]
    assert ATTACHED not in log


def test_a_start_that_is_interrupted_leaves_nothing(served: Served) -> None:
    """Ctrl-C while it loads, in a process that goes on, as a notebook's does."""
    result, _ = served.start(
        args={"max_model_len": 99}, sabotage="engine_shim.state:Keeper.loaded", sabotage_with="interrupt", fails=True
    )
    assert result["error"].startswith("KeyboardInterrupt")
    assert [o.file for o in served.paths.objects() if o.kind == "publication"] == []
    result, log = served.start()
    assert result["tokens"] == served.disk and ATTACHED in log


def test_with_require_a_fault_of_ours_ends_the_start(served: Served) -> None:
    require = {"BALLAST_MODE": "require"}
    result, log = served.start(env=require)
    assert result["tokens"] == served.disk and ATTACHED in log
    result, _ = served.start(env=require, sabotage="engine_shim.state:Found.check_final", fails=True)
    assert "BALLAST_MODE=require" in result["error"]
    result, _ = served.start(env={**require, "BALLAST_STATE": "0"})
    assert result["tokens"] == served.disk, "the checkpoint's tensors from memory are Ballast as well"


@contextlib.contextmanager
def replaced(path: Path, data: bytes) -> Iterator[None]:
    """Another file in the place of an object; afterwards the very same one is back."""
    aside = path.with_name(f"aside-{path.name}")
    path.rename(aside)
    try:
        path.write_bytes(data)
        path.chmod(0o400)
        yield
    finally:
        aside.rename(path)


def test_a_damaged_segment_is_not_used(served: Served) -> None:
    segment = served.paths.segment(served.states(1)[0], 0)
    whole = segment.read_bytes()
    with replaced(segment, whole[: len(whole) // 2]):
        result, log = served.start(env=QUIET)
    assert result["tokens"] == served.disk and ATTACHED not in log
    assert f"the state of {MODEL} in the pool cannot be used" in log, log[-3000:]


def test_a_newer_manifest_is_not_used(served: Served) -> None:
    path = served.paths.manifest(served.states(1)[0])
    newer = bytearray(path.read_bytes())
    newer[8] = manifest.FORMAT + 1
    with replaced(path, bytes(newer)):
        result, log = served.start(env=QUIET)
    assert result["tokens"] == served.disk and ATTACHED not in log
    assert f"has format {manifest.FORMAT + 1} and this Ballast reads format {manifest.FORMAT}" in log, log[-3000:]
    result, log = served.start()
    assert result["tokens"] == served.disk and ATTACHED in log


@pytest.mark.parametrize("args", [{"dtype": "float32"}, {"hf_overrides": {"rms_norm_eps": 0.01}}], ids=["dtype", "config"])
def test_the_state_of_another_configuration_is_not_used(served: Served, args: dict[str, Any]) -> None:
    result, log = served.start(args=args, env=QUIET)
    assert "holds no state of" in log and "the nearest one differs in" in log, log[-3000:]
    right, _ = served.start(args=args, env={"BALLAST_MODE": "off"})
    assert result["tokens"] == right["tokens"] != served.disk


def test_without_packing_everything_runs_on_the_shared_bytes(served: Served) -> None:
    plain = {"BALLAST_VLLM_ZERO_COPY": "1"}
    first, _ = served.start(env={**plain, **QUIET, "BALLAST_STATE": "0"})
    result, log = served.start(env=plain)
    assert result["tokens"] == first["tokens"]
    assert ATTACHED in log and "used where it lies, without packing" in log
    packed, log = served.start()
    assert packed["tokens"] == served.disk and ATTACHED in log, "one state serves engines with and without packing"


def test_without_a_sidecar_and_with_one_that_is_back(served: Served) -> None:
    """What is in memory serves without a sidecar, and a restarted one takes it over."""
    served.sidecar.kill()
    result, log = served.start(env=QUIET)
    assert result["tokens"] == served.disk and ATTACHED in log
    result, log = served.start(env={"BALLAST_STATE": "0", "BALLAST_WAIT": "0"})
    assert result["tokens"] == served.disk and "is not published" in log
    nowhere, log = served.start(env={"BALLAST_POOL": f"none-{secrets.token_hex(4)}", "BALLAST_WAIT": "0"})
    assert nowhere["tokens"] == served.disk and ATTACHED not in log
    served.sidecar = Sidecar(served.paths.pool, served.model)
    served.sidecar.ready(MODEL)
    result, log = served.start()
    assert result["tokens"] == served.disk and ATTACHED in log


def test_a_fine_tune_at_the_same_place_is_not_mistaken(served: Served) -> None:
    """The same names, sizes and headers; other weights. Last, since it changes the checkpoint of these tests."""
    shard = sorted(served.model.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    for index in range(len(data) - 20001, len(data), 2):
        data[index] ^= 0x10
    shard.unlink()
    shard.write_bytes(data)
    tuned, log = served.start(env={**QUIET, "BALLAST_WAIT": "0"})
    right, _ = served.start(env={"BALLAST_MODE": "off"})
    assert tuned["tokens"] == right["tokens"] != served.disk
    assert ATTACHED not in log
