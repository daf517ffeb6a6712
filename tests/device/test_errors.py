"""Every call of the driver fails once: the engine gets its weights from host memory, the sidecar goes on, and says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff import attachment
from engine_shim.handoff.names import PoolPaths
from sidecar import cuda
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import instrumented
from tests.device import gpu_side
from tests.device.emulated import A, Machine, contents, resident, until
from tests.never_wrong import engine_side
from tests.ownership.actors import GROUP, MEMBER, become
from tests.processes import Sidecar, ballast, environment


@pytest.fixture(scope="module")
def served(libcuda: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Sidecar]]:
    """A small model of two files, on one GPU, for all engines of these tests."""
    machine = Machine(libcuda, {A: 1 << 26})
    folder = tmp_path_factory.mktemp("errors") / "model"
    folder.mkdir()
    for seed in (0, 1):
        Checkpoint({f"w{seed}": entry("F32", (200, 300), seed)}).write(folder / f"{seed}.safetensors")
    with machine.sidecar(f"t-e{time.time_ns():x}", folder) as sidecar:
        resident(sidecar.paths, 1, {A})
        yield machine, sidecar
    machine.close()


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("cuIpcOpenMemHandle_v2:201@1", "share one PID namespace"),
        ("cuIpcOpenMemHandle_v2:400@2", "is gone"),
        ("cuDevicePrimaryCtxRetain:46", "compute mode"),
        ("cuIpcOpenMemHandle_v2:1@2", "give both containers the same GPU"),
        ("cuIpcOpenMemHandle_v2:999", "(999)"),
        ("cuDevicePrimaryCtxRetain:2", "no memory left"),
        ("cuCtxPushCurrent_v2:201@2", "(201)"),
        ("cuIpcCloseMemHandle:400", ""),
        ("cuCtxSynchronize:700", ""),
        ("cuDevicePrimaryCtxRelease_v2:4", ""),
        ("cuDeviceGetUuid:801", ""),
    ],
)
def test_of_an_engine(served: tuple[Machine, Sidecar], call: str, line: str) -> None:
    machine, sidecar = served
    with machine.engine(sidecar.paths.pool, EMU_FAIL=call) as engine:
        truth = engine(engine_side.load, "open", "model")
        assert engine(gpu_side.open_on, "cuda:0", "model") == truth
        if line:
            assert line in engine.says("is copied from host memory")
            assert {r.residency for r in attachment.alive(sidecar.paths)} == {"host"}
            engine.start(gpu_side.collected)
            engine.result()
            assert len(machine.log("open", engine.pid)) == len(machine.log("close", engine.pid)), "a handle stays open"
        else:
            assert any("lies in the memory of" in said for said in engine.lines)
        engine.start(gpu_side.leave)
        engine.wait()
    until(lambda: not list(attachment.alive(sidecar.paths)), "the leases end")


@pytest.mark.parametrize("call", ["cuInit:100", "cuDeviceGetCount:999", "cuDeviceGetUuid_v2:999"])
def test_of_an_engine_that_cannot_tell_its_gpus(served: tuple[Machine, Sidecar], call: str) -> None:
    """Which device was meant cannot be known: one sentence, and no other device's memory."""
    machine, sidecar = served
    with machine.engine(sidecar.paths.pool, EMU_FAIL=call) as engine:
        kind, text = engine(gpu_side.attempt, "cuda:0", "model")
        assert kind == "DeviceError" and f"({call.split(':')[1]}): " in text


def test_of_an_engine_in_another_pid_namespace(served: tuple[Machine, Sidecar]) -> None:
    machine, sidecar = served
    with machine.engine(sidecar.paths.pool, EMU_PIDNS="1") as engine:
        assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")
        assert "share one PID namespace" in engine.says("is copied from host memory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users: run the tests as root")
def test_of_another_user_of_a_pool_shared_with_a_group(machine: Machine, pool_name: str, folder: Path) -> None:
    """Handles are the owner's alone, since what they open can be written to: members get host memory, and are told why."""
    machine.folder.chmod(0o777)
    with machine.sidecar(pool_name, folder, args=("--device", A, "--group", str(GROUP))) as sidecar:
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as member, machine.engine(pool_name) as same_user:
            member(become, MEMBER, [GROUP])
            truth = same_user(gpu_side.open_on, "cuda:0", "model")
            assert machine.log("open", same_user.pid)
            assert member(gpu_side.open_on, "cuda:0", "model") == truth
            assert "its holder is another user's" in member.says("is copied from host memory")
            assert not machine.log("open", member.pid)
            residencies = {r.residency for r in attachment.alive(sidecar.paths)}
            assert residencies == {"host", f"cuda:{A}"}


HOLDER_CALLS = ["cuMemAlloc_v2:2@2"]
MORE_HOLDER_CALLS = [
    "cuIpcGetMemHandle:801@1",
    "cuMemcpyHtoDAsync_v2:700@1",
    "cuMemGetInfo_v2:999@1",
    "cuMemAlloc_v2:2@1",
    "cuMemHostAlloc:2@1",
    "cuStreamCreate:999@1",
    "cuStreamSynchronize:999@1",
    "cuMemGetAddressRange_v2:500@1",
    "cuIpcGetMemHandle:999@2",
    "cuCtxPushCurrent_v2:201@1",
    "cuCtxPushCurrent_v2:201@4",
    "cuDevicePrimaryCtxRetain:2@1",
    "cuMemFree_v2:999@1",
]


@pytest.mark.parametrize(
    "call", [*HOLDER_CALLS, *(pytest.param(call, marks=pytest.mark.slow) for call in MORE_HOLDER_CALLS)]
)
def test_of_a_holder(machine: Machine, pool_name: str, folder: Path, call: str, tmp_path: Path) -> None:
    """Fails once: said, served from host memory, tried again, and there."""
    soon = instrumented(tmp_path, "import sidecar.holder\nsidecar.holder._AGAIN = 0.5\n")
    with machine.sidecar(pool_name, folder, args=("--device", A), EMU_FAIL=call, **soon) as sidecar:
        sidecar.ready("model")
        if not call.startswith("cuMemFree"):
            line = sidecar.says("is served from host memory")
            assert f"({call.split(':')[1].split('@')[0]})" in line
            assert not machine.used(A) or contents(sidecar.paths).devices  # type: ignore[union-attr]
        resident(sidecar.paths, 1, {A})
        assert machine.used(A) == sum(contents(sidecar.paths).segments)  # type: ignore[union-attr]
        assert not machine.log("leak")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"EMU_FAIL": "cuInit:803"}, "(803)"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "no GPU is visible"),
        ({"EMU_EXCLUSIVE": "1", "EMU_FAIL": "cuDevicePrimaryCtxRetain:46"}, "compute mode"),
    ],
    ids=["driver", "none", "exclusive"],
)
@pytest.mark.slow
def test_without_a_gpu_that_works_host_memory_serves(
    machine: Machine, pool_name: str, folder: Path, more: dict[str, str], line: str
) -> None:
    with machine.sidecar(pool_name, folder, **more) as sidecar:
        sidecar.ready("model")
        sidecar.says(line)
        assert not contents(sidecar.paths).devices  # type: ignore[union-attr]
        with machine.engine(pool_name) as engine:
            assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")


def test_without_a_driver(pool_name: str, folder: Path) -> None:
    with Sidecar(pool_name, folder, args=["--device", "cuda:all"]) as sidecar:
        sidecar.ready("model")
        sidecar.says("libcuda.so.1 is not there")
        sidecar.says("host memory serves")


def test_a_device_that_is_none(pool_name: str, folder: Path) -> None:
    for command in (["serve", str(folder)], ["hold"]):
        done = ballast(*command, "--pool", pool_name, "--device", "gpu:0")
        assert done.returncode == 2 and "is no device: write cuda:all" in done.stderr, done.stderr
    for device in ("cuda", "cuda:", "cuda:x", "cuda:-1", "GPU-123", "0,,1", "MIG-", ""):
        with pytest.raises(ValueError, match="is no device"):
            cuda.parse(device)
    assert cuda.parse("cuda:0, 1") == ["0", "1"] and cuda.parse(A.upper()) == [A]


def test_a_gpu_that_is_not_there(machine: Machine, pool_name: str) -> None:
    environ = environment(**machine.environ())
    done = ballast("hold", "--pool", pool_name, "--device", "cuda:7", env=environ)
    assert done.returncode == 1 and "there is no 7 here, but cuda:0" in done.stderr


def test_without_the_bindings(machine: Machine, pool_name: str, tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text("")
    environ = environment(**machine.environ())
    environ["PYTHONPATH"] = f"{tmp_path}:{environ['PYTHONPATH']}"
    done = ballast("hold", "--pool", pool_name, env=environ)
    assert done.returncode == 1 and "pip install 'ballast-sidecar[cuda]'" in done.stderr


# The emulated driver itself: what these tests rest on


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("free(p); free(p)", "double free"),
        ("pop(); alloc()", "without a current context"),
        ("d.cuIpcCloseMemHandle(p)", "not open"),
        ("d.cuMemcpyHtoD(p + 4000, bytes(200), 200)", "beyond what is allocated"),
        ("d.cuMemcpyHtoDAsync(p, bytearray(64), 64, d.cuStreamCreate(0)[1])", "not pinned"),
        ("d.cuDevicePrimaryCtxRelease(0)", "still has memory"),
        ("d.cuMemHostUnregister(4096)", "not registered"),
    ],
)
def test_the_emulated_driver_stops_who_breaks_a_rule(libcuda: Path, code: str, what: str) -> None:
    machine = Machine(libcuda)
    program = (
        "from cuda.bindings import driver as d\n"
        "d.cuInit(0)\nd.cuCtxPushCurrent(d.cuDevicePrimaryCtxRetain(0)[1])\n"
        "alloc, free, pop = lambda: int(d.cuMemAlloc(4096)[1]), d.cuMemFree, d.cuCtxPopCurrent\np = alloc()\n" + code
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(**machine.environ()), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -6 and what in done.stderr
    with pytest.raises(AssertionError, match=what):
        machine.close()


def test_the_emulated_driver_shares_as_the_real_one_does(machine: Machine, pool_name: str) -> None:
    """Not in its own process, not from another PID namespace, not on another GPU, not after the exporter's death; twice with
    a count."""
    with machine.engine(pool_name) as exporter, machine.engine(pool_name) as importer:
        handle = exporter(gpu_side.raw_export, A)
        assert exporter(gpu_side.raw_open, A, handle) == 201
        assert importer(gpu_side.raw_open, machine_other(machine), handle) == 1
        with machine.engine(pool_name, EMU_PIDNS="7") as other:
            assert other(gpu_side.raw_open, A, handle) == 201
        first, second = importer(gpu_side.raw_open, A, handle), importer(gpu_side.raw_open, A, handle)
        assert first == second > 4096
        assert importer(gpu_side.raw_close, first) == importer(gpu_side.raw_close, first) == 0
        exporter.kill()
        assert importer(gpu_side.raw_open, A, handle) == 400


def machine_other(machine: Machine) -> str:
    return next(uuid for uuid in machine.gpus if uuid != A)


def test_pool_paths_know_the_new_objects() -> None:
    paths = PoolPaths("p")
    for path, kind in ((paths.holder("0" * 16), "holder"), (paths.copies("0" * 16, 7), "copies")):
        parsed = paths.parse(path.name)
        assert parsed is not None and (parsed.kind, parsed.generation, parsed.tmp) == (kind, None, False)
