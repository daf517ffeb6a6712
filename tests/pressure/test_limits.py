"""Too little of everything, for real: file system, memory cgroup, descriptors, address space, a root that cannot be written.

Each time: one clear sentence, nothing left behind, and the engine has its weights.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff.names import PoolPaths
from tests.conftest import left_behind
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.generations.parts import checkpoint
from tests.generations.states import content
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.pressure import limited
from tests.processes import Sidecar, ballast, environment

MIB = 1 << 20
SIZE = 6 * MIB

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: mounts, namespaces or control groups")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A memory file system of 16 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", place], capture_output=True).returncode:
        pytest.skip("mounting a file system takes root")
    yield place
    subprocess.run(["umount", place], check=True)


def serve(*args: str, prefix: tuple[str, ...] = (), timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "sidecar", "serve", *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
def test_a_file_system_made_smaller_and_larger_again(pool_name: str, tmp_path: Path, small: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    with Sidecar(pool_name, folder, directory=small) as sidecar:
        sidecar.ready("m")
        with Engine(pool_name, BALLAST_DIR=str(small)) as attached, Engine(pool_name, BALLAST_DIR=str(small)) as late:
            mine = attached(engine_side.load, "open", "m", "mine")
            used = os.statvfs(small)
            room = (used.f_blocks - used.f_bfree) * used.f_frsize
            subprocess.run(["mount", "-o", f"remount,size={room}", small], check=True)
            # Not one page for a record: the engine reads its files.
            assert late(engine_side.load, "safe_open", str(folder / "model.safetensors"))
            assert "has no room left for" in late.lines[0] and late.lines[0].endswith("(loading without Ballast)")
            assert attached(engine_side.kept, "mine") == mine
            checkpoint(folder, 2, SIZE)
            assert "no room left" in sidecar.says("cannot be loaded", timeout=20)
            assert sidecar.process.poll() is None
            subprocess.run(["mount", "-o", "remount,size=32m", small], check=True)
            assert late(engine_side.load, "open", "m", "now")
            (folder / "model.safetensors").touch()
            sidecar.ready("m", above=1)


@pytest.mark.parametrize("megabytes", [1, 12])
def test_a_file_system_too_small_by_more_or_less(pool_name: str, tmp_path: Path, small: Path, megabytes: int) -> None:
    """From no room for the control page to just not enough for the second model."""
    folders = [str(checkpoint(tmp_path / name, 1, SIZE)) for name in "ab"]
    subprocess.run(["mount", "-o", f"remount,size={megabytes * MIB // 2}", small], check=True)
    serving = [*folders, "--pool", pool_name, "--dir", str(small)]
    done = serve(*serving, "--on-exit", "remove")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "are free" in line or "no room left" in line], done.stderr
    assert not list(small.iterdir()) and not left_behind(pool_name)


# Control groups


@pytest.fixture
def cgroup() -> Iterator[limited.MemoryGroup]:
    group = limited.MemoryGroup.make()
    if group is None:
        pytest.skip("no memory control group can be made here (neither v1 nor v2 is writable)")
    yield group
    group.remove()


def test_a_memory_limit_is_seen_before_anything_is_allocated(
    pool_name: str, tmp_path: Path, cgroup: limited.MemoryGroup
) -> None:
    """To run into it would be to be killed."""
    cgroup.limit(160 * MIB)
    folder = tmp_path / "m"
    folder.mkdir()
    limited.sparse(folder / "model.safetensors", 300 * MIB)
    done = serve(str(folder), "--pool", pool_name, prefix=cgroup.prefix())
    assert done.returncode == 1
    assert "under the container's memory limit, which shared memory counts against: raise it" in done.stderr
    assert not left_behind(pool_name)


@pytest.mark.slow
def test_the_kernel_kills_a_sidecar_that_loads(pool_name: str, tmp_path: Path, cgroup: limited.MemoryGroup) -> None:
    """Because of a neighbour in its container. The engine waits no longer than it should; the next sidecar serves."""
    folder = checkpoint(tmp_path / "m", 1, 24 * MIB)
    file = folder / "model.safetensors"
    hold(file, 8 * MIB)
    cgroup.limit(400 * MIB)
    with Sidecar(pool_name, folder, env=instrumented(tmp_path, HOLDING)) as sidecar, Engine(pool_name) as engine:
        cgroup.add(sidecar.pid)
        sidecar.ready("m", "loading")
        engine.start(engine_side.load, "safe_open", str(file))
        Path(f"/proc/{sidecar.pid}/oom_score_adj").write_text("1000")
        eater = cgroup.eat(600 * MIB)
        assert sidecar.process.wait(30) == -signal.SIGKILL
        eater.kill()
        eater.wait()
        began = time.monotonic()
        assert engine.result(30)
        assert time.monotonic() - began < 20
        assert "the sidecar died while loading 'm'" in engine.lines[-1]
    release(file)
    with Sidecar(pool_name, folder) as again:
        number = again.ready("m").number
        assert again.paths.segment(number, 0).read_bytes()[: 24 * MIB] == content(1, 24 * MIB)
        assert not [name for name in again.paths.objects() if name.tmp]


# Descriptors, locked memory, address space


def served_under(limit: str, checkpoint: Path, pool: str) -> tuple[int, str]:
    """What `ballast wait` returns, and what a sidecar under this limit of prlimit(1) says until it is interrupted."""
    command = ["prlimit", limit, "--", sys.executable, "-m", "sidecar", "serve", str(checkpoint), "--pool", pool]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    waited = ballast("wait", "m", "--pool", pool, "--timeout", "20")
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert "Traceback" not in said, said
    return waited.returncode, said


def test_few_descriptors_for_a_sidecar(pool_name: str, tmp_path: Path) -> None:
    """Sixteen are enough for any number of files: they are read one after the other."""
    from tests.checkpoints import Checkpoint, entry

    (tmp_path / "m").mkdir()
    for number in range(20):
        Checkpoint({f"t{number}": entry("F32", (10,), number)}).write(tmp_path / "m" / f"{number}.safetensors")
    waited, said = served_under("--nofile=16", tmp_path / "m", pool_name)
    assert waited == 0, said
    assert not left_behind(pool_name)


def test_fewer_than_a_sidecar_needs(pool_name: str, tmp_path: Path) -> None:
    """It says so and ends, and has left nothing."""
    waited, said = served_under("--nofile=5", checkpoint(tmp_path / "m", 1, SIZE), pool_name)
    assert waited != 0 and "oo many open files; raise the limit (ulimit -n)" in said, said
    assert not left_behind(pool_name)


@pytest.mark.parametrize("free", [2, 3])
def test_few_descriptors_for_an_engine(pool_name: str, tmp_path: Path, free: int) -> None:
    """Two are what the engine needs by itself; a third is not enough for page, record and segment."""
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    file = str(folder / "model.safetensors")
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as engine, Engine() as plain:
        sidecar.ready("m")
        for process in (engine, plain):
            assert process(limited.few_descriptors, free)
        assert engine(engine_side.load, "safe_open", file) == plain(engine_side.load, "safe_open", file)
        assert "too many open files" in engine.lines[0] and len(engine.lines) == 1


def test_no_locked_memory_is_needed(pool_name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name, BALLAST_MODE="require") as engine:
        resource.prlimit(sidecar.pid, resource.RLIMIT_MEMLOCK, (0, 0))
        sidecar.ready("m")
        engine(limited.lower, "RLIMIT_MEMLOCK", 0)
        assert engine(engine_side.load, "open", "m", "mine")


def test_no_address_space_for_an_engine(pool_name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", 1, 48 * MIB)
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as engine:
        sidecar.ready("m")
        engine(limited.no_more_address_space, 20 * MIB)
        name, text = engine(engine_side.attempt, "open", "m")
        assert name in ("NoRoom", "HandoffError") and "\n" not in text and "address space" in text, (name, text)
        engine(limited.lower, "RLIMIT_AS", resource.RLIM_INFINITY)
        assert engine(engine_side.load, "open", "m"), "and it has done no harm"


def test_a_sidecar_with_little_address_space(pool_name: str, tmp_path: Path) -> None:
    """What it cannot map it reads; and if even that is too much it says so, and blames no disk."""
    folder = tmp_path / "m"
    folder.mkdir()
    limited.sparse(folder / "model.safetensors", 64 * MIB)
    waited, said = served_under(f"--as={limited.ADDRESS_SPACE}", folder, pool_name)
    assert waited == 0 or "no address space" in said or "start new thread" in said, said
    assert not left_behind(pool_name)


# A root that cannot be written


@pytest.mark.slow
@needs_root
def test_a_root_that_cannot_be_written(pool_name: str, tmp_path: Path) -> None:
    """As containers with readOnlyRootFilesystem have it: shared memory is all that a sidecar and an engine need."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no 'unshare' here: install util-linux")
    folder = checkpoint(tmp_path / "m", 1, SIZE)
    read = "import safetensors.torch, sys; print(len(safetensors.torch.load_file(sys.argv[1])))"
    script = f"""
set -e
mount --make-rprivate /
for place in $(awk '$2 != "/proc" && $2 !~ /^\\/(dev|proc|sys)/ {{print $2}}' /proc/mounts); do
    mount -o remount,bind,ro "$place" 2>/dev/null || true
done
if touch {tmp_path}/x 2>/dev/null; then echo still writable; exit 77; fi
"$1" -m sidecar serve {folder} --pool {pool_name} & serving=$!
"$1" -m sidecar wait m --pool {pool_name} --timeout 30
BALLAST_MODE=require "$1" -m sidecar run --pool {pool_name} -- "$1" -c '{read}' {folder}/model.safetensors
kill -INT $serving; wait $serving
"""
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script, "bash", sys.executable],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no private mount namespace can be had here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1" and "comes from memory" in done.stderr, done.stderr
    assert not PoolPaths(pool_name).objects()
