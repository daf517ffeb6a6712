"""How much of a GPU an engine takes to be its own: mapped weights count exactly once, and nothing changes while it measures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.crash.instrumented import instrumented
from tests.device import gpu_side
from tests.device.emulated import MIB, A, B, Machine, contents, resident, until
from tests.never_wrong import engine_side

UTILIZATION = 0.9  # of vLLM


def room_for_cache(total: int, external: int, free_before: int, free_after: int, peak: int = 0) -> int:
    """What vLLM 0.32 gives its KV cache: `request_memory` (v1/worker/utils.py) less `memory_profiling`'s
    `non_kv_cache_memory` (utils/mem_utils.py), which is what became less free since the engine began, and the peak.

    With vLLM's own code: tests/vllm/test_device.py."""
    requested = math.ceil(total * UTILIZATION) - external
    assert free_before >= requested > 0, "vLLM would refuse to start"
    assert free_before >= free_after, "vLLM would say 'Error in memory profiling'"
    return requested - (free_before - free_after) - peak


def test_mapped_weights_count_exactly_once(machine: Machine, pool_name: str, folder: Path) -> None:
    """An engine that maps its weights has the same room for its cache as one that has loaded them itself, to the byte."""
    with machine.sidecar(pool_name, folder, args=("--device", "cuda:all")) as sidecar:
        sidecar.ready("model")
        with machine.engine(pool_name) as engine:
            engine(gpu_side.publish, "model", B)
        weights = sum(resident(sidecar.paths, 2, {B}).segments)
        until(lambda: machine.used(B) == weights, "the checkpoint's copy is gone")
        with machine.engine(pool_name) as engine:
            key = engine(gpu_side.state_key, "model")
            external = engine(gpu_side.external, [key], "cuda:1")
            assert external == weights
            free, total = engine(gpu_side.memory, "cuda:1")
            engine(gpu_side.attach_tied, "cuda:1", "model")
            mapped = room_for_cache(total, external, free, engine(gpu_side.memory, "cuda:1")[0])
            # Another GPU has nothing of it, and a key that nobody has published has nothing anywhere.
            assert engine(gpu_side.external, [key], "cuda:0") == 0
            assert engine(gpu_side.external, ["0" * 32], "cuda:1") == 0
            assert engine(gpu_side.external, [key, key[::-1]], "cuda:1") == weights
    until(lambda: not machine.used(B), "the pool is gone")
    with machine.engine(pool_name) as engine:
        free, total = engine(gpu_side.memory, "cuda:1")
        engine(gpu_side.allocate, "cuda:1", weights)
        loaded = room_for_cache(total, 0, free, engine(gpu_side.memory, "cuda:1")[0])
    assert mapped == loaded == math.ceil(64 * MIB * UTILIZATION) - weights


def test_a_starting_engine_finds_room_and_nothing_changes_while_it_measures(
    machine: Machine, pool_name: str, folder: Path, tmp_path: Path
) -> None:
    """A copy that nobody uses gives way to an engine with weights of its own, and comes back once that has settled."""
    soon = instrumented(tmp_path, "import sidecar.holder\nsidecar.holder.SETTLE = 4.0\n")
    with machine.sidecar(pool_name, folder, args=("--device", A), **soon) as sidecar:
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as engine:
            assert engine(gpu_side.external, [], "cuda:0") == 0
            assert not machine.used(A), "the room is not there when the engine begins to measure"
            assert engine(gpu_side.memory, "cuda:0")[0] == 64 * MIB
            engine(gpu_side.sleep, 1.0)
            assert not machine.used(A), "something was added while the engine measured"
            assert "an engine is starting" in sidecar.says("has no copy on")
            resident(sidecar.paths, 1, {A})  # the engine has settled, and there is room beside it
        with machine.engine(pool_name) as engine:
            assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")
            assert machine.log("open", engine.pid)


@pytest.mark.slow
def test_what_is_in_use_stays(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder, args=("--device", A)) as sidecar:
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as user, machine.engine(pool_name) as starting:
            truth = user(gpu_side.open_on, "cuda:0", "model")
            assert starting(gpu_side.external, [], "cuda:0") == 0
            assert machine.used(A) == sum(contents(sidecar.paths).segments)  # type: ignore[union-attr]
            assert user(gpu_side.kept) == truth
            user(gpu_side.sleep, 0.5)
            with machine.engine(pool_name) as another:  # nor is it taken out of service
                assert another(gpu_side.open_on, "cuda:0", "model") == truth
                assert machine.log("open", another.pid)
        resident(sidecar.paths, 1, {A})


@pytest.mark.slow
def test_what_another_engine_has_claimed_is_not_waited_for(machine: Machine, pool_name: str, folder: Path) -> None:
    """It is kept for that one, which may attach yet, and the next engine measures without it."""
    with machine.sidecar(pool_name, folder, args=("--device", A)) as sidecar:
        sidecar.ready("model")
        with machine.engine(pool_name) as one, machine.engine(pool_name) as other:
            one(gpu_side.publish, "model", A)
            weights = sum(resident(sidecar.paths, 2, {A}).segments)
            assert one(gpu_side.external, [one(gpu_side.state_key, "model")], "cuda:0") == weights
            assert other(gpu_side.external, [], "cuda:0") == 0
            assert not [line for line in other.lines if "is not as this engine wants it" in line]
            assert machine.used(A) == weights


# What `ballast doctor` is told


@pytest.mark.slow
def test_findings(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.engine(pool_name) as engine:
        found = engine(gpu_side.findings, pool_name)
        text = f"pool {pool_name!r} has no holder of device memory"
        assert ("gpu: holder", "note", text, "start the sidecar with --device") in found
        assert not [row for row in found if row[1] == "fault"]
    with machine.sidecar(pool_name, folder, args=("--device", A)) as sidecar:
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as engine:
            verdicts = {check: verdict for check, verdict, _, _ in engine(gpu_side.findings, pool_name)}
            assert verdicts == {
                "gpu: driver": "ok", "gpu: cuda:0": "ok", "gpu: cuda:1": "ok", "gpu: allocator": "ok",
                "gpu: PID namespace": "ok", "gpu: same GPU": "ok", "gpu: peer access": "ok",
            }  # fmt: skip
            assert not machine.log("context", engine.pid), "looking made a context"
        for more, check, verdict, remedy in (
            ({"CUDA_VISIBLE_DEVICES": B}, "same GPU", "fault", "same GPU"),
            ({"CUDA_VISIBLE_DEVICES": ""}, "driver", "note", "CUDA_VISIBLE_DEVICES"),
            ({"EMU_NO_IPC": "1"}, "cuda:0", "fault", "host memory"),
            ({"EMU_EXCLUSIVE": "1"}, "cuda:0", "fault", "nvidia-smi -c 0"),
            ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "allocator", "note", "PYTORCH_CUDA_ALLOC_CONF"),
            ({"EMU_FAIL": "cuInit:803"}, "driver", "note", "update the driver"),
        ):
            with machine.engine(pool_name, **more) as engine:
                rows = [row for row in engine(gpu_side.findings, pool_name) if row[0] == f"gpu: {check}"]
                assert rows[0][1] == verdict and remedy in rows[0][3], rows


@pytest.mark.slow
def test_newer_weights_get_the_room_of_older_ones_that_nobody_uses(libcuda: Path, pool_name: str, folder: Path) -> None:
    """Two states of one model, of different keys, on a GPU that has room for one."""
    machine = Machine(libcuda, {A: 11 * MIB})
    try:
        with machine.sidecar(pool_name, folder, args=("--device", A)) as sidecar:
            resident(sidecar.paths, 1, {A})
            with machine.engine(pool_name) as engine:
                engine(gpu_side.publish, "model", A, 0, "first")
                resident(sidecar.paths, 2, {A})
                until(lambda: machine.used(A) == 2 * MIB, "the checkpoint's copy is freed")
                engine(gpu_side.allocate, "cuda:0", 8 * MIB)
                truth = engine(gpu_side.publish, "model", A, 1, "second")
                resident(sidecar.paths, 3, {A})
                resident(sidecar.paths, 2, set())
                with machine.engine(pool_name) as other:
                    assert other(gpu_side.attach_tied, "cuda:0", "model", "second") == truth
                    assert machine.log("open", other.pid)
    finally:
        machine.close()
