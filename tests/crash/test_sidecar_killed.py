"""kill -9 of a real sidecar, wherever it is: the next one adopts without reading the disk, or sweeps before it loads."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from engine_shim.handoff import posix
from engine_shim.handoff.catalog import LOADING, READY, RETIRED, ControlPage
from engine_shim.handoff.names import PoolPaths, new_id, temporary
from sidecar.pool import PoolWriter, purge
from tests.checkpoints import Checkpoint, entry
from tests.conftest import left_behind
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.never_wrong.test_bits import random_entry
from tests.processes import Sidecar, ballast

MIB = 1 << 20
LARGE = 40 * MIB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose second file is far larger than anything that a sidecar reads besides."""
    folder = tmp_path / "model"
    folder.mkdir()
    Checkpoint({"small": entry("F32", (1000,), 1)}).write(folder / "0.safetensors")
    Checkpoint({"large": random_entry(LARGE, 2), "more": entry("U8", (5,), 3)}).write(folder / "1.safetensors")
    return folder


def load(engine: Engine) -> dict[str, str]:
    found: dict[str, str] = engine(engine_side.load, "open", "model")
    return found


@pytest.fixture
def truth(folder: Path) -> dict[str, str]:
    with Engine() as engine:
        return {
            **engine(engine_side.load, "safe_open", str(folder / "0.safetensors")),
            **engine(engine_side.load, "safe_open", str(folder / "1.safetensors")),
        }


def bytes_read(pid: int) -> int:
    """What a process has asked the kernel to read for it, from anywhere."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError


def memory(paths: PoolPaths) -> int:
    """Bytes that the pool's objects occupy."""
    return sum(os.stat(paths.dir / name.file).st_blocks * 512 for name in paths.objects())


def test_adopting_without_the_disk(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """Not one byte of the weights is read: the files may be gone, and if they are there, nobody looks into them."""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        assert bytes_read(sidecar.pid) > LARGE  # that this number means something
        inodes = [os.stat(sidecar.paths.segment(1, number)).st_ino for number in range(2)]
        sidecar.kill()
    with Sidecar(pool_name, folder) as sidecar:
        assert sidecar.ready("model").number == 1
        sidecar.says("adopted model, generation 1")
        assert bytes_read(sidecar.pid) < LARGE / 2
        assert inodes == [os.stat(sidecar.paths.segment(1, number)).st_ino for number in range(2)]
        with Engine(pool_name, BALLAST_MODE="require") as engine:
            assert load(engine) == truth
        sidecar.kill()
    away = folder.with_name("away")
    os.rename(folder, away)
    with Sidecar(pool_name, folder) as sidecar:
        assert sidecar.ready("model").number == 1
        sidecar.says("serving what the pool holds of it")
        assert inodes == [os.stat(sidecar.paths.segment(1, number)).st_ino for number in range(2)]
        with Engine(pool_name, BALLAST_MODE="require") as engine:
            assert load(engine) == truth
            # A copy of the files elsewhere is still told to be the same.
            assert engine(engine_side.load, "safe_open", str(away / "0.safetensors")).items() <= truth.items()
        assert sidecar.interrupt() == 0


def test_the_same_after_an_orderly_stop(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        assert sidecar.terminate() == 0
    assert left_behind(pool_name)
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as engine:
        assert sidecar.ready("model").number == 1
        assert bytes_read(sidecar.pid) < LARGE / 2
        assert load(engine) == truth
        assert sidecar.interrupt() == 0
    assert not left_behind(pool_name)


def test_files_that_changed_while_nobody_looked(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """Adopted is only what the files still are; the old generation is there for engines that know it by name, until then."""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        sidecar.kill()
    Checkpoint({"small": entry("F32", (1000,), 9)}).write(folder / "0.safetensors")
    hold(folder / "1.safetensors")
    with (
        Sidecar(pool_name, folder, env=instrumented(folder.parent, HOLDING)) as sidecar,
        Engine(pool_name) as engine,
        Engine() as plain,
    ):
        sidecar.ready("model", LOADING)
        assert load(engine) == truth
        now = plain(engine_side.load, "safe_open", str(folder / "0.safetensors"))
        assert not now.items() & truth.items()
        release(folder / "1.safetensors")
        assert sidecar.ready("model", above=1).number == 2
        assert load(engine) == {**truth, **now}
        assert engine(engine_side.load, "safe_open", str(folder / "0.safetensors")) == now
        assert sidecar.interrupt() == 0


@pytest.mark.parametrize("position", [0, 8 * MIB])
def test_killed_while_loading(pool_name: str, folder: Path, truth: dict[str, str], position: int) -> None:
    """Before the large file, and in the middle of it."""
    hold(folder / "1.safetensors", position)
    environment = instrumented(folder.parent, HOLDING)
    paths = PoolPaths(pool_name)
    with Sidecar(pool_name, folder, env=environment) as sidecar:
        generation = sidecar.ready("model", LOADING)
        deadline = time.monotonic() + 20
        while memory(paths) < position or not sidecar.catalog.get(1).shard_done(0):  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sidecar.kill()
    left = [name for name in paths.objects() if name.kind == "segment"]
    assert len(left) == 2 and generation.number == 1
    hold(folder / "0.safetensors")
    with Sidecar(pool_name, folder, env=environment) as sidecar:
        assert sidecar.ready("model", LOADING, above=1).number == 2
        # Swept before anything is allocated: half a model, and half of it again, may be more than there is room for.
        assert memory(paths) < 4 * MIB  # one small segment, and the control page
        assert not [name for name in paths.objects() if name.generation == 1]
        release(folder / "0.safetensors")
        release(folder / "1.safetensors")
        sidecar.ready("model")
        with Engine(pool_name) as engine:
            assert load(engine) == truth
        assert sidecar.interrupt() == 0


def test_killed_while_adopting(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    dying = """
import os, sidecar.pool
check = sidecar.pool.PoolWriter._check
def killed(*args):
    check(*args)
    os.kill(os.getpid(), 9)
sidecar.pool.PoolWriter._check = killed
"""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        sidecar.kill()
    for _ in range(3):
        with Sidecar(pool_name, folder, env=instrumented(folder.parent, dying)) as sidecar:
            assert sidecar.process.wait(20) == -9
        with Engine(pool_name, BALLAST_MODE="require") as engine:
            assert load(engine) == truth
    with Sidecar(pool_name, folder) as sidecar:
        assert sidecar.ready("model").number == 1
        assert sidecar.interrupt() == 0


def test_killed_again_and_again(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """At moments that nobody chose; engines go on as if nothing had happened."""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        sidecar.kill()
    with Engine(pool_name, BALLAST_MODE="require") as engine:
        for turn in range(4):
            with Sidecar(pool_name, folder) as sidecar:
                time.sleep(0.1 + 0.15 * turn)
                assert load(engine) == truth
                sidecar.kill()
            assert load(engine) == truth
    purge(PoolPaths(pool_name))


def test_an_engine_outlives_its_sidecar(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """What it holds is held against the next sidecar too, which has never heard of it."""
    fast = "import sidecar.serve\nsidecar.serve.SWEEP_EVERY = 0.2\n"
    environment = instrumented(folder.parent, fast)
    with Engine(pool_name) as engine:
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            sidecar.ready("model")
            assert engine(engine_side.load, "open", "model", "kept") == truth
            sidecar.kill()
        assert engine(engine_side.kept, "kept") == truth
        other = folder.with_name("other.safetensors")
        Checkpoint({"x": entry("F32", (5,))}).write(other)
        with Sidecar(pool_name, other, env=environment) as sidecar:
            sidecar.ready("other")
            sidecar.says("model is no longer asked for and is retired")
            time.sleep(1)
            held = sidecar.catalog.get(1)
            assert held is not None and held.state == RETIRED
            assert sidecar.paths.segment(1, 1).exists()
            assert engine(engine_side.kept, "kept") == truth
            with Engine(pool_name) as late:  # retired is not for those who come now
                assert late(engine_side.attempt, "open", "model")[0] == "NotFound"
            engine.kill()
            deadline = time.monotonic() + 10
            while [name for name in sidecar.paths.objects() if name.kind == "attachment" or name.generation == 1]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert sidecar.catalog.get(1) is None
            assert sidecar.interrupt() == 0


def test_everything_that_the_dead_may_leave(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """And nothing that belongs to anybody else."""
    paths = PoolPaths(pool_name)
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        sidecar.kill()
    leftovers = [
        paths.manifest(77), paths.segment(77, 0), paths.segment(77, 1), temporary(paths.manifest(1)),
        paths.segment(1, 0).with_name(paths.segment(1, 0).name + ".tmp"), temporary(paths.control),
        paths.attachment(new_id()), temporary(paths.attachment(new_id())), paths.publication_segment(new_id(), 0),
        temporary(paths.publication(new_id())), paths.publication_segment(new_id(), 3).with_suffix(".w3.tmp"),
    ]  # fmt: skip
    others = [
        PoolPaths(pool_name + "x").manifest(1), paths.control.with_name(f"ballast-{pool_name}"),
        paths.path("something.else"), paths.control.with_name(f"ballast-{pool_name}.g1.w0.bak"),
    ]  # fmt: skip
    for path in leftovers + others:
        fd = posix.create(path)
        posix.write_exactly(fd, b"x" * 100, 0, path)
        os.close(fd)
    try:
        with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as engine:
            assert sidecar.ready("model").number == 1
            deadline = time.monotonic() + 10
            while [path for path in leftovers if path.exists()]:
                assert time.monotonic() < deadline, [path.name for path in leftovers if path.exists()]
                time.sleep(0.02)
            assert all(path.exists() for path in others)
            assert load(engine) == truth
            # A number once seen is not used again: an engine may still have something of that name.
            Checkpoint({"small": entry("F32", (1000,), 9)}).write(folder / "0.safetensors")
            assert sidecar.ready("model", above=1).number > 77
            assert sidecar.interrupt() == 0
    finally:
        for path in others:
            path.unlink()


def test_a_leaked_guard(pool_name: str, folder: Path) -> None:
    """Killed while it held the guard, with the named semaphore taken for ever."""
    dying = """
import os, sidecar.pool
class Dying(sidecar.pool.Guard):
    def hold(self, timeout):
        really = super().hold(timeout)
        really.__enter__()
        os.kill(os.getpid(), 9)
sidecar.pool.Guard = Dying
"""
    import posix_ipc

    paths = PoolPaths(pool_name)
    with Sidecar(pool_name, folder, env=instrumented(folder.parent, dying)) as sidecar:
        assert sidecar.process.wait(20) == -9
    semaphore = posix_ipc.Semaphore(paths.guard)
    assert semaphore.value == 0
    began = time.monotonic()
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model", READY)
        assert semaphore.value == 1
        assert time.monotonic() - began < 15
        assert sidecar.interrupt() == 0
    semaphore.close()


def test_one_sidecar_at_a_time(pool_name: str, folder: Path) -> None:
    with Sidecar(pool_name, folder) as first:
        first.ready("model")
        with Sidecar(pool_name, folder) as second:
            assert second.process.wait(20) == 1
            assert "another sidecar already serves pool" in second.log
        assert first.process.poll() is None
        assert first.catalog.get(1) is not None
        assert ballast("purge", "--pool", pool_name, "--yes").returncode != 0
        assert first.catalog.get(1) is not None
        first.kill()
    # The kernel gives its lock back: no file to remove by hand.
    with Sidecar(pool_name, folder) as third:
        third.ready("model")
        assert third.interrupt() == 0


def test_a_purge_between_opening_and_locking(pool_paths: PoolPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a page that nobody finds any more is worth nothing: the sidecar takes the one that is there, or makes one."""
    really = posix.try_flock

    def purged(fd: int) -> bool:
        monkeypatch.setattr(posix, "try_flock", really)
        pool_paths.control.unlink()
        return really(fd)

    ControlPage.create_or_open(pool_paths).close()
    monkeypatch.setattr(posix, "try_flock", purged)
    writer = PoolWriter(pool_paths)
    assert posix.try_flock is really and writer.page.current
    page = ControlPage.open(pool_paths)
    assert page.sidecar_alive
    page.close()
    writer.close(remove=True)


def test_a_pool_that_is_wiped_under_its_sidecar(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """As some engines' start scripts do: it says so and ends, and engines keep what they have."""
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as engine:
        sidecar.ready("model")
        assert engine(engine_side.load, "open", "model", "kept") == truth
        for name in sidecar.paths.objects():
            (sidecar.paths.dir / name.file).unlink()
        assert sidecar.process.wait(20) == 1
        assert "was removed" in sidecar.log and "Traceback" not in sidecar.log
        assert engine(engine_side.kept, "kept") == truth
        assert engine(engine_side.load, "safe_open", str(folder / "0.safetensors")).items() <= truth.items()
    purge(PoolPaths(pool_name), force=True)
    assert shutil.which("sh")
