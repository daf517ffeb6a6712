"""Who is suspended, or stuck in a read that never comes back, holds nobody up for longer than was agreed.

SIGSTOP stands for every way in which a process stands still: a frozen container, a debugger, a machine that swaps. A read
from a FIFO that nobody writes to stands for one of a disk or a network volume that is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import LOADING, READY, RETIRED, ControlPage
from engine_shim.handoff.errors import Busy
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.semaphores import Guard
from sidecar.pool import purge
from tests.checkpoints import Checkpoint, entry
from tests.conftest import left_behind
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.never_wrong import engine_side
from tests.never_wrong.forked import Engine
from tests.processes import Sidecar, ballast
from tests.waits import acts

WAIT = 1.5  # BALLAST_WAIT of these tests, in seconds
MARGIN = 3.0  # what reading the file itself may take on a busy machine

# Every read of a checkpoint's data waits in the kernel for a FIFO that nobody writes to.
STUCK = """
import os, sys, sidecar.loader
fifo = os.environ["TEST_FIFO"]
def stuck(fd, buffer, position, needed=None):
    return len(os.read(os.open(fifo, os.O_RDWR), 1))
sidecar.loader._read = stuck
"""
HASTY = "import sidecar.serve\nsidecar.serve.SWEEP_EVERY = 0.2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        Checkpoint({f"{number}.w": entry("F32", (1000,), number)}).write(folder / f"{number}.safetensors")
    return folder


@pytest.fixture
def truth(folder: Path) -> dict[str, str]:
    with Engine() as engine:
        return {name: value for number in range(2) for name, value in by_file(engine, folder, number).items()}


def by_file(engine: Engine, folder: Path, number: int) -> dict[str, str]:
    found: dict[str, str] = engine(engine_side.load, "safe_open", str(folder / f"{number}.safetensors"))
    return found


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_stopped_sidecar_has_loaded_it(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """What is ready needs no sidecar: engines attach as ever, and at once."""
    with (
        Sidecar(pool_name, folder) as sidecar,
        Engine(pool_name, BALLAST_MODE="require", BALLAST_WAIT=str(WAIT)) as engine,
    ):
        sidecar.ready("model")
        with stopped(sidecar.pid):
            began = time.monotonic()
            for number in range(2):
                assert by_file(engine, folder, number).items() <= truth.items()
            assert engine(engine_side.load, "open", "model") == truth
            assert time.monotonic() - began < WAIT
        assert sidecar.interrupt() == 0


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_a_sidecar_that_stands_still_while_it_loads(
    pool_name: str, folder: Path, truth: dict[str, str], tmp_path: Path, how: str
) -> None:
    """It lives, as far as anybody can tell, so it is waited for; but no longer than BALLAST_WAIT. Then the engine starts
    without it, which costs it the waiting and nothing else."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = STUCK if how == "stuck" else HOLDING
    hold(folder / "0.safetensors")
    environment = {**instrumented(tmp_path, code), "TEST_FIFO": str(fifo)}
    with (
        Sidecar(pool_name, folder, env=environment) as sidecar,
        Engine(pool_name, BALLAST_WAIT=str(WAIT)) as auto,
        Engine(pool_name, BALLAST_WAIT=str(WAIT), BALLAST_MODE="require") as strict,
    ):
        sidecar.ready("model", LOADING)
        with stopped(sidecar.pid) if how == "stopped" else contextlib.nullcontext():
            began = time.monotonic()
            auto.start(engine_side.load, "safe_open", str(folder / "0.safetensors"))
            strict.start(engine_side.attempt, "safe_open", str(folder / "0.safetensors"))
            assert auto.result() == {"0.w": truth["0.w"]}
            kind, text = strict.result()
            took = time.monotonic() - began
            assert WAIT * 0.9 < took < WAIT + MARGIN
            assert kind == "HandoffError" and "has not finished loading" in text and "BALLAST_WAIT" in text
            assert "has not finished loading" in auto.lines[-1] and "without Ballast" in auto.lines[-1]
            assert engine_opens_in(auto) < WAIT + MARGIN
        if how == "stopped":
            release(folder / "0.safetensors")
            assert sidecar.ready("model")
            assert by_file(strict, folder, 0) == {"0.w": truth["0.w"]}
            assert sidecar.interrupt() == 0
        else:
            assert sidecar.kill() == -signal.SIGKILL
    purge(PoolPaths(pool_name), force=True)


def engine_opens_in(engine: Engine) -> float:
    began = time.monotonic()
    kind, _ = engine(engine_side.attempt, "open", "model")
    assert kind == "NotReady"
    return time.monotonic() - began


def waits_for(fifo: Path, pid: int) -> bool:
    """Whether this process has the FIFO open, which it only does to read from it."""
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link) == str(fifo):
                return True
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sidecar_ends_although_a_read_does_not(
    pool_name: str, folder: Path, truth: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """Within END_WITHIN and a little; with a line that says why. SIGINT removes the pool all the same."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = STUCK + "import sidecar.serve\nsidecar.serve.END_WITHIN = 1.0\n"
    with Sidecar(pool_name, folder, env={**instrumented(tmp_path, code), "TEST_FIFO": str(fifo)}) as sidecar:
        sidecar.ready("model", LOADING)

        def building() -> bool:
            return any(name.kind == "segment" and name.tmp for name in sidecar.paths.objects())

        deadline = time.monotonic() + 10
        while not (building() and waits_for(fifo, sidecar.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        began = time.monotonic()
        assert sidecar.signal(number) == 1
        assert time.monotonic() - began < 1 + MARGIN
        assert "does not come back" in sidecar.log and "Traceback" not in sidecar.log
    assert bool(left_behind(pool_name)) == (number == signal.SIGTERM)
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name, BALLAST_MODE="require") as engine:
        sidecar.ready("model")
        assert engine(engine_side.load, "open", "model") == truth
        assert sidecar.interrupt() == 0


def test_an_engine_is_stopped_while_its_generation_is_retired(
    pool_name: str, folder: Path, truth: dict[str, str], tmp_path: Path
) -> None:
    """It lives, so nothing is freed, for as long as it sleeps; it wakes up with the bits that it had. Then it goes."""
    environment = instrumented(tmp_path, HASTY)
    other = tmp_path / "other.safetensors"
    Checkpoint({"x": entry("F32", (5,))}).write(other)
    with Engine(pool_name) as engine:
        with Sidecar(pool_name, folder, env=environment) as sidecar:
            sidecar.ready("model")
            assert engine(engine_side.load, "open", "model", "kept") == truth
            sidecar.terminate()
        with stopped(engine.pid):
            with Sidecar(pool_name, other, env=environment) as sidecar:
                sidecar.ready("other")
                sidecar.says("model is no longer asked for and is retired")
                time.sleep(1)
                held = sidecar.catalog.get(1)
                assert held is not None and held.state == RETIRED
                assert sidecar.paths.segment(1, 1).exists()
                sidecar.kill()
            with Sidecar(pool_name, other, env=environment) as sidecar:  # nor by the next one
                sidecar.ready("other")
                time.sleep(0.6)
                assert sidecar.paths.segment(1, 1).exists()
                sidecar.terminate()
        assert engine(engine_side.kept, "kept") == truth
        with Sidecar(pool_name, other, env=environment) as sidecar:
            sidecar.ready("other")
            assert engine(engine_side.kept, "kept") == truth
            engine(engine_side.forget, "kept")
            gone = time.monotonic() + 10
            while sidecar.catalog.get(1) is not None:
                assert time.monotonic() < gone
                time.sleep(0.02)
            assert sidecar.interrupt() == 0


def test_an_engine_is_stopped_in_the_middle_of_attaching(pool_name: str, folder: Path, truth: dict[str, str]) -> None:
    """Between its record and its second look at the catalog, while its generation goes: it is told so when it wakes up."""
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name, BALLAST_WAIT="1") as engine:
        sidecar.ready("model")
        engine(acts.pause_before_the_second_look)
        engine.start(engine_side.load, "open", "model")
        deadline = time.monotonic() + 10
        while Path(f"/proc/{engine.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [name for name in sidecar.paths.objects() if name.kind == "attachment"]
        new = folder / "new"
        for seed in range(2, 5):
            Checkpoint({"1.w": entry("F32", (1000,), seed)}).write(new)
            os.rename(new, folder / "1.safetensors")
            sidecar.ready("model", READY, above=seed - 1)
        first = sidecar.catalog.get(1)
        assert first is None or first.state == RETIRED
        os.kill(engine.pid, signal.SIGCONT)
        found = engine.result()
        assert found["0.w"] == truth["0.w"] and found["1.w"] != truth["1.w"]  # it looked again, late as it was
        assert sidecar.interrupt() == 0


def test_a_stopped_publisher_keeps_the_guard_and_is_not_robbed_of_it(
    pool_name: str, folder: Path, truth: dict[str, str], tmp_path: Path
) -> None:
    """The sidecar gives up its sweep with a line, and goes on with everything else; when the publisher wakes up, its state
    is adopted."""
    fast = HASTY + "import sidecar.pool\nsidecar.pool.GUARD_TIMEOUT = 0.3\n"
    with (
        Sidecar(pool_name, folder, env=instrumented(tmp_path, fast)) as sidecar,
        Engine(pool_name) as publisher,
        Engine(pool_name, BALLAST_MODE="require", BALLAST_WAIT="5") as engine,
    ):
        sidecar.ready("model")
        publisher(acts.pause_with_the_guard)
        publisher.start(acts.publish)
        sidecar.says("is being written by another process")
        page = ControlPage.open(sidecar.paths, write=True)
        with pytest.raises(Busy), Guard(sidecar.paths, page.fd).hold(0.3):
            pass
        page.close()
        assert engine(engine_side.load, "open", "model") == truth
        assert ballast("status", "--pool", pool_name).returncode == 0
        os.kill(publisher.pid, signal.SIGCONT)
        publisher.result()
        assert sidecar.ready("published", READY)
        assert sidecar.interrupt() == 0


def test_a_signal_may_come_at_any_moment(pool_name: str, folder: Path) -> None:
    """Also while the main thread holds the lock of the event that tells the others to stop."""
    from sidecar.serve import Sidecar as Serving

    sidecar = Serving(PoolPaths(pool_name), [])
    with sidecar._stop._cond:  # type: ignore[attr-defined]
        told = threading.Thread(target=sidecar._on_signal, args=(signal.SIGTERM, None), daemon=True)
        told.start()
        told.join(5)
        assert not told.is_alive()
    assert sidecar._leaves_nothing() is False
