"""Starts that go as they should, and starts in which something is wrong: the tokens are right, always."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ATTACHED, Engines, adopted

from engine_shim.handoff import attachment, manifest
from sidecar.parity import compare_trees, read_dumps
from tests.processes import Sidecar

MODEL = "qwen2"
TWO: dict[str, Any] = {"ranks": 2, "args": {"tp_size": 2}}


@pytest.fixture(scope="module")
def disk(engines: Engines, checkpoints: Path) -> list[Any]:
    """The right answers."""
    result, _ = engines.run(checkpoints / MODEL)
    answers: list[Any] = result["answers"]
    return answers


@pytest.fixture
def served(engines: Engines, checkpoints: Path, tmp_path: Path, pool: str) -> Iterator[tuple[Path, Sidecar, int]]:
    """A checkpoint of the test's own, a sidecar that serves it, and the generation of its published state."""
    model = tmp_path / MODEL
    shutil.copytree(checkpoints / MODEL, model)
    with Sidecar(pool, model) as sidecar:
        sidecar.ready(MODEL)
        engines.run(model, pool, only="load")
        yield model, sidecar, adopted(sidecar, 1)[0]
        sidecar.interrupt()


def test_two_at_once_one_of_them_killed_and_the_sidecar_as_well(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, number = served
    pool = sidecar.paths.pool
    first, second = (engines.start(model, pool, then="hang") for _ in range(2))
    assert first.result()["answers"] == second.result()["answers"] == disk
    held = {record.pid for record in attachment.alive(sidecar.paths) if record.generation == number}
    assert held == {*first.pids, *second.pids}
    first.kill()
    # kill -9 of the sidecar while the second serves: it goes on, and the next sidecar takes the state over.
    sidecar.kill()
    with Sidecar(pool, model) as successor:
        successor.ready(MODEL)
        result, log = engines.run(model, pool)
        assert result["answers"] == disk and ATTACHED in log
        assert "published" not in log
        assert {r.pid for r in attachment.alive(sidecar.paths) if r.generation == number} == set(second.pids)
        second.kill()
        successor.interrupt()


def test_two_ranks_have_a_state_each(engines: Engines, checkpoints: Path, pool: str) -> None:
    with Sidecar(pool, checkpoints / "qwen3-moe") as sidecar:
        sidecar.ready("qwen3-moe")
        right, _ = engines.run(checkpoints / "qwen3-moe", **TWO)
        first, log = engines.run(checkpoints / "qwen3-moe", pool, **TWO)
        adopted(sidecar, 2)
        again, attached = engines.run(checkpoints / "qwen3-moe", pool, **TWO)
        assert first["answers"] == right["answers"]
        assert again["answers"] == right["answers"]
        assert log.count("published the state of") == 2, log[-4000:]
        assert attached.count(ATTACHED) == 2, attached[-4000:]
        # One rank alone has neither of the two.
        _, log = engines.run(checkpoints / "qwen3-moe", pool, {"BALLAST_PUBLISH": "0"}, only="load")
        assert "holds no state of" in log and ATTACHED not in log
        sidecar.interrupt()


RANKS: dict[str, dict[str, Any]] = {
    "two stages": {"pp_size": 2},
    "experts on two ranks": {"tp_size": 2, "ep_size": 2},
    "attention replicated": {"tp_size": 2, "enable_dp_attention": True, "dp_size": 2},
}


@pytest.mark.parametrize("kind", RANKS)
def test_other_ranks_load_what_they_loaded_from_disk(
    engines: Engines, checkpoints: Path, pool: str, tmp_path: Path, kind: str
) -> None:
    """Loading only: every tensor of each rank, after loading and after post-processing."""
    with Sidecar(pool, checkpoints / "qwen3-moe") as sidecar:
        sidecar.ready("qwen3-moe")
        told = {}
        for way in ("disk", "first", "attached"):
            folder = tmp_path / way
            folder.mkdir()
            _, log = engines.run(
                checkpoints / "qwen3-moe", pool if way != "disk" else None, {"BALLAST_PARITY": str(folder)},
                only="load", ranks=2, args=RANKS[kind],
            )  # fmt: skip
            told[way] = read_dumps(folder)
            if way == "first":
                adopted(sidecar, 2)
        assert log.count(ATTACHED) == 2, log[-4000:]
        assert len(told["disk"]) == 4, "two ranks, two stages each"
        for way in ("first", "attached"):
            for name, dump in told["disk"].items():
                assert compare_trees(dump, told[way][name]) == [], f"{way} {name}"
        sidecar.interrupt()


def test_a_scheduler_killed_in_the_middle_of_attaching(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, number = served
    for place in ("engine_shim.ladder:Pool.attach", "engine_shim.modules:views", "engine_shim.modules:_compare"):
        engine = engines.start(model, sidecar.paths.pool, sabotage_with="kill", sabotage=place)
        engine.killed()
    deadline = time.monotonic() + 20
    while any(record.generation == number for record in attachment.alive(sidecar.paths)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    result, log = engines.run(model, sidecar.paths.pool)
    assert result["answers"] == disk and ATTACHED in log


def test_a_publisher_killed_leaves_nothing_wrong(engines: Engines, checkpoints: Path, pool: str, disk: list[Any]) -> None:
    with Sidecar(pool, checkpoints / MODEL) as sidecar:
        sidecar.ready(MODEL)
        for place in ("engine_shim.state:Keeper.move", "engine_shim.state:Keeper.loaded", "engine_shim.state:Keeper.finish"):
            engines.start(checkpoints / MODEL, pool, sabotage_with="kill", sabotage=place).killed()
        assert [g.kind for g in sidecar.catalog.generations] == ["checkpoint"]
        result, _ = engines.run(checkpoints / MODEL, pool)
        assert result["answers"] == disk
        adopted(sidecar, 1)
        sidecar.interrupt()


SABOTAGE = {
    # where it raises -> what the log must say
    "engine_shim.hooks.sglang:key": "RuntimeError: sabotage",
    "engine_shim.state:find": "RuntimeError: sabotage",
    "engine_shim.state:Found.bind": "is not used: RuntimeError: sabotage",
    "engine_shim.state:Found.check_final": "is not used: RuntimeError: sabotage",
    "engine_shim.start:Start.end": "once the model was loaded: RuntimeError: sabotage",
    "engine_shim.state:Keeper.move": "is not published: sabotage",
    "engine_shim.state:Keeper.loaded": "is not published: sabotage",
    "engine_shim.state:Keeper.finish": "is not published: sabotage",
    "engine_shim.handoff.publication:Publication.commit": "is not published: sabotage",
}


def test_faults_of_ours_leave_a_working_engine(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, _ = served
    for place, line in SABOTAGE.items():
        keeping = "Keeper" in place or "Publication" in place
        # A configuration that has no state yet, where keeping it is to fail: one that has is not published again.
        environ, args = ({}, {"context_length": 96}) if keeping else ({"BALLAST_PUBLISH": "0"}, {})
        result, log = engines.run(model, sidecar.paths.pool, environ, sabotage=place, args=args)
        assert result["answers"] == disk, place
        assert line in log and "sabotage" in log, f"{place}: {log[-3000:]}"


def test_a_start_that_is_interrupted_leaves_nothing(engines: Engines, served: tuple[Path, Sidecar, int]) -> None:
    """Ctrl-C while it loads, in a process that goes on, as a notebook's does."""
    model, sidecar, _ = served
    engine = engines.start(
        model, sidecar.paths.pool, args={"context_length": 80}, sabotage="engine_shim.state:Keeper.loaded",
        sabotage_with="interrupt", fails=True, then="hang",
    )  # fmt: skip
    assert engine.result()["error"].startswith("KeyboardInterrupt")
    assert [o.file for o in sidecar.paths.objects() if o.kind == "publication"] == []
    engine.kill()


def test_with_require_a_fault_of_ours_ends_the_start(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, _ = served
    require = {"BALLAST_MODE": "require"}
    result, log = engines.run(model, sidecar.paths.pool, require)
    assert result["answers"] == disk and ATTACHED in log
    result, _ = engines.run(
        model, sidecar.paths.pool, require, sabotage="engine_shim.state:Found.check_final", fails=True
    )
    assert "BALLAST_MODE=require" in result["error"], result
    result, _ = engines.run(model, None, require, fails=True)
    assert "BALLAST_MODE=require: not loading without Ballast" in result["error"], "there is no pool, and it has started"
    result, _ = engines.run(model, sidecar.paths.pool, {**require, "BALLAST_STATE": "0", "BALLAST_PUBLISH": "0"})
    assert result["answers"] == disk, "the checkpoint's tensors from memory are Ballast as well"


def test_what_is_damaged_or_other_is_not_used(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, number = served
    pool, paths = sidecar.paths.pool, sidecar.paths
    segment = paths.segment(number, 0)
    whole, contents = segment.read_bytes(), paths.manifest(number).read_bytes()
    quiet = {"BALLAST_PUBLISH": "0"}

    def replace(path: Path, data: bytes) -> None:
        """In place: a segment is known by its inode as well."""
        path.chmod(0o600)
        path.write_bytes(data)
        path.chmod(0o400)

    replace(segment, whole[: len(whole) // 2])
    result, log = engines.run(model, pool, quiet)
    assert result["answers"] == disk and ATTACHED not in log
    assert "is shorter than its manifest says" in log, log[-3000:]
    replace(segment, whole)

    newer = bytearray(contents)
    newer[8] = manifest.FORMAT + 1
    replace(paths.manifest(number), bytes(newer))
    result, log = engines.run(model, pool, quiet)
    assert result["answers"] == disk and ATTACHED not in log
    assert "has format 2 and this Ballast reads format 1" in log, log[-3000:]
    replace(paths.manifest(number), contents)

    # One byte of a weight: nobody notices when attaching (the protocol says so), and the answers show that it is used.
    flipped = bytearray(whole)
    for index in range(1, len(whole) // 2, 2):
        flipped[index] ^= 0x40
    replace(segment, bytes(flipped))
    result, log = engines.run(model, pool, quiet)
    assert ATTACHED in log and result["answers"] != disk, "the answers do not depend on the shared bytes"
    replace(segment, whole)

    # Another configuration, and a fine-tune at the same place with the same names, sizes and headers.
    for args in ({"dtype": "float32"}, {"json_model_override_args": '{"rms_norm_eps": 0.01}'}):
        result, log = engines.run(model, pool, quiet, args=args)
        there, _ = engines.run(model, args=args)
        assert result["answers"] == there["answers"]
        assert "holds no state of" in log and "the nearest one differs in" in log, log[-3000:]
    shard = sorted(model.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    for index in range(len(data) - 20001, len(data), 2):
        data[index] ^= 0x10
    shard.unlink()
    shard.write_bytes(data)
    tuned, log = engines.run(model, pool, {**quiet, "BALLAST_WAIT": "0"})
    there, _ = engines.run(model)
    assert tuned["answers"] == there["answers"] != disk
    assert ATTACHED not in log


def test_what_is_looked_at_from_outside_the_tree_is_left_alone(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    """A view that a model keeps in a list would go on looking at memory that holds no weights."""
    model, sidecar, _ = served
    result, log = engines.run(model, sidecar.paths.pool, hidden_view=True)
    assert result["answers"] == disk
    assert "is looked at from outside the module tree" in log and ATTACHED not in log, log[-3000:]


def test_a_draft_has_a_state_of_its_own(engines: Engines, checkpoints: Path, pool: str, tmp_path: Path) -> None:
    """Target and draft of speculative decoding, the draft made of the very checkpoint of its target. Loading only."""
    model = checkpoints / MODEL
    with Sidecar(pool, model) as sidecar:
        sidecar.ready(MODEL)
        told, logs = {}, {}
        for way in ("disk", "first", "attached"):
            (tmp_path / way).mkdir()
            _, logs[way] = engines.run(
                model, pool if way != "disk" else None, {"BALLAST_PARITY": str(tmp_path / way)}, only="load", draft=str(model)
            )
            told[way] = read_dumps(tmp_path / way)
            if way == "first":
                adopted(sidecar, 2)
        assert logs["first"].count("published the state of") == 2 and ATTACHED not in logs["first"], logs["first"][-4000:]
        assert logs["attached"].count(ATTACHED) == 2, logs["attached"][-4000:]
        assert set(told["disk"]) == {f"{role}-0-{stage}" for role in ("target", "draft") for stage in ("loaded", "final")}
        for way in ("first", "attached"):
            for name, dump in told["disk"].items():
                assert compare_trees(dump, told[way][name]) == [], f"{way} {name}"
        sidecar.interrupt()


def test_another_outcome_of_post_processing_is_not_used(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    """Bound, and then not what the engine that published had: loaded once more, without us."""
    model, sidecar, _ = served
    result, log = engines.run(model, sidecar.paths.pool, twisted=True)
    assert result["answers"] == disk
    assert "after post-processing and was" in log or "after post-processing and had" in log, log[-3000:]
    assert ATTACHED not in log and list(attachment.alive(sidecar.paths)) == []


def test_an_engine_without_weight_files_attaches_to_the_model_that_is_named(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any], tmp_path: Path
) -> None:
    model, sidecar, _ = served
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    result, log = engines.run(bare, sidecar.paths.pool, {"BALLAST_MODEL": MODEL, "BALLAST_MODE": "require"})
    assert result["answers"] == disk and ATTACHED in log
    (bare / "config.json").write_text((bare / "config.json").read_text() + "\n")
    result, log = engines.run(bare, sidecar.paths.pool, {"BALLAST_MODEL": MODEL}, fails=True)
    assert "differs from the one that" in log and ATTACHED not in log


def test_format_and_switches_that_are_not_ours(
    engines: Engines, served: tuple[Path, Sidecar, int], disk: list[Any]
) -> None:
    model, sidecar, _ = served
    result, log = engines.run(model, sidecar.paths.pool, {"BALLAST_MODE": "off"})
    assert result["answers"] == disk and "ballast:" not in log
    _, log = engines.run(model, sidecar.paths.pool, args={"load_format": "dummy"}, only="load")
    assert ATTACHED not in log and "published" not in log
    assert list(attachment.alive(sidecar.paths)) == []
