"""kill -9 of engine, sidecar and holder: nothing is freed under an engine, and none goes on with memory that is gone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_shim import onboard
from engine_shim.handoff import attachment, holder
from engine_shim.handoff.catalog import READY
from tests.checkpoints import Checkpoint, entry
from tests.conftest import left_behind
from tests.crash.instrumented import instrumented
from tests.device import gpu_side
from tests.device.emulated import A, B, Machine, contents, ended, gone, resident, the_holder, until
from tests.never_wrong import engine_side
from tests.processes import ROOT, Sidecar, ballast, environment

ONE = ("--device", A)


@pytest.mark.slow
def test_an_engine_is_killed(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder, args=ONE) as sidecar:
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as engine, machine.engine(pool_name) as other:
            truth = engine(gpu_side.open_on, "cuda:0", "model")
            assert other(gpu_side.open_on, "cuda:0", "model") == truth
            engine.kill()
            until(lambda: len(list(attachment.alive(sidecar.paths))) == 1, "its lease goes")
            assert other(gpu_side.kept) == truth
            with machine.engine(pool_name) as third:
                assert third(gpu_side.open_on, "cuda:0", "model") == truth
        assert machine.used(A) == sum(contents(sidecar.paths).segments)  # type: ignore[union-attr]


def test_a_sidecar_is_killed_and_nobody_minds(machine: Machine, pool_name: str, folder: Path) -> None:
    """The memory is its holder's: engines go on, others attach, and the next sidecar changes nothing, without the disk."""
    first = machine.sidecar(pool_name, folder, args=ONE)
    before = resident(first.paths, 1, {A})
    kept = the_holder(first.paths)
    with machine.engine(pool_name) as engine:
        truth = engine(gpu_side.open_on, "cuda:0", "model")
        first.kill()
        with machine.engine(pool_name) as other:
            assert other(gpu_side.open_on, "cuda:0", "model") == truth
        allocated = machine.log("alloc")
        shutil.move(folder, folder.with_name("elsewhere"))
        folder.mkdir()
        with machine.sidecar(pool_name, folder, args=(*ONE, "--name", "model")) as second:
            second.ready("model")
            assert resident(second.paths, 1, {A}).devices == before.devices
            assert the_holder(second.paths) == kept and machine.log("alloc") == allocated
            assert engine(gpu_side.kept) == truth
            engine(gpu_side.sleep, 2 * onboard._LOOK_EVERY)
            assert not [line for line in engine.lines if "is gone" in line]
            engine(gpu_side.forget)
    ended(kept)
    assert not machine.log("leak", kept)


@pytest.mark.parametrize("policy", ["exit", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_holder_is_killed(machine: Machine, pool_name: str, folder: Path, policy: str, tmp_path: Path) -> None:
    """Engines that use its memory are told, and end; the sidecar starts another, which copies from host memory."""
    with machine.sidecar(pool_name, folder, args=ONE) as sidecar:
        before = resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name, BALLAST_ON_SIDECAR_LOSS=policy) as engine, machine.engine(pool_name) as at_host:
            truth = engine(gpu_side.open_on, "cuda:0", "model")
            assert at_host(engine_side.load, "open", "model", "kept") == truth
            engine(gpu_side.on_loss, str(tmp_path / "told"))
            shutil.move(folder, folder.with_name("elsewhere"))
            os.kill(the_holder(sidecar.paths), signal.SIGKILL)
            if policy == "exit":
                engine.wait(30)
                assert "it ends now" in engine.log
            else:
                assert "restart this engine" in engine.says("is not defined any more")
            until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text(), "the callback is called")
            # Whoever starts meanwhile, or holds host memory, is served.
            assert at_host(engine_side.kept, "kept") == truth
            with machine.engine(pool_name) as other:
                assert other(gpu_side.open_on, "cuda:0", "model") == truth
            if policy == "warn":
                engine.kill()
            after = resident(sidecar.paths, 1, {A})
            assert after.devices != before.devices and after.tensors == before.tensors
            assert at_host(gpu_side.open_on, "cuda:0", "model", "again") == truth
            assert any("lies in the memory of" in line for line in at_host.lines)


@pytest.mark.slow
def test_the_exit_code_of_an_engine_whose_memory_is_lost(machine: Machine, pool_name: str, folder: Path) -> None:
    program = (
        "import time, engine_shim\nfrom tests.device import gpu_side\n"
        f"gpu_side.prepare({str(machine.library)!r})\nm = engine_shim.open('model', device='cuda:0')\n"
        "print(m.tensors['large'].sum().item(), flush=True)\ntime.sleep(60)\n"
    )
    with machine.sidecar(pool_name, folder, args=ONE) as sidecar:
        resident(sidecar.paths, 1, {A})
        engine = subprocess.Popen(
            [sys.executable, "-c", program], env=environment(pool_name, **machine.environ()), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert engine.stdout is not None and engine.stdout.readline()
        os.kill(the_holder(sidecar.paths), signal.SIGKILL)
        _, said = engine.communicate(timeout=30)
        assert engine.returncode == onboard.LOST == 75
        assert "BALLAST_ON_SIDECAR_LOSS" in said


# A holder that looks for attachments while a copy that it withdraws is on its page still: an engine could take it, unseen.
WATCHED = """
import sys
from engine_shim.handoff import holder
from sidecar.holder import Holder

look = Holder._attachments

def attachments(self):
    for held in self._held.values():
        if held.withdrawn and held.copy in holder.read(self.paths, self.identifier, held.generation, held.sizes).copies:
            print("looks too early", file=sys.stderr)
    return look(self)

Holder._attachments = attachments
"""


def test_what_an_engine_has_open_is_freed_only_once_it_is_gone(
    machine: Machine, pool_name: str, folder: Path, tmp_path: Path
) -> None:
    """New weights come: the old copy stays for whoever has it, and nobody new gets it."""
    with machine.sidecar(pool_name, folder, args=ONE, **instrumented(tmp_path, WATCHED)) as sidecar:
        old = resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as engine:
            truth = engine(gpu_side.open_on, "cuda:0", "model")
            Checkpoint({"large": entry("F32", (1 << 20,), 9)}).write(folder / "new")
            os.rename(folder / "new", folder / "1.safetensors")
            sidecar.ready("model", above=1, timeout=60)
            new = resident(sidecar.paths, 2, {A})
            resident(sidecar.paths, 1, set())
            assert machine.used(A) == sum(old.segments) + sum(new.segments)
            assert engine(gpu_side.kept) == truth
            with machine.engine(pool_name) as other:
                other(gpu_side.open_on, "cuda:0", "model")
            engine(gpu_side.forget)
        until(lambda: machine.used(A) == sum(new.segments), "the old copy is freed")
        assert sidecar.catalog.get(1).state == READY  # type: ignore[union-attr]  # in host memory it stays
        assert "looks too early" not in sidecar.log


@pytest.mark.slow
def test_the_pool_is_removed_under_an_engine(machine: Machine, pool_name: str, folder: Path, tmp_path: Path) -> None:
    """The holder learns of an engine that came a moment ago before its record goes, although it looks rarely."""
    soon = instrumented(
        tmp_path, "import sidecar.holder, sidecar.residency\nsidecar.holder._TURN = sidecar.residency._END = 0.5\n"
    )
    with machine.sidecar(pool_name, folder, args=ONE, **soon) as sidecar:
        resident(sidecar.paths, 1, {A})
        pid = the_holder(sidecar.paths)
        with machine.engine(pool_name) as engine:
            truth = engine(gpu_side.open_on, "cuda:0", "model")
            sidecar.process.send_signal(signal.SIGINT)
            sidecar.says("stopped; the pool is removed")
            sidecar.says("waiting for 1 engines")
            assert engine(gpu_side.kept) == truth and not gone(pid)
            engine(gpu_side.sleep, 2 * onboard._LOOK_EVERY)
            assert not [line for line in engine.lines if "is gone" in line]
            engine(gpu_side.forget)
        ended(pid)
        assert not machine.log("leak", pid) and not machine.used(A)


@pytest.mark.slow
def test_a_kept_pool_keeps_its_holder_and_purging_ends_it(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder, args=ONE) as sidecar:
        resident(sidecar.paths, 1, {A})
        pid = the_holder(sidecar.paths)
        assert sidecar.terminate() == 0
        with machine.engine(pool_name) as engine:
            engine(gpu_side.open_on, "cuda:0", "model")
            assert machine.log("open", engine.pid)
        assert not gone(pid)
        assert ballast("purge", "--pool", pool_name).returncode == 0
        ended(pid)
        assert not machine.used(A) and not left_behind(pool_name)


@pytest.mark.slow
def test_a_holder_on_its_own(machine: Machine, pool_name: str, folder: Path) -> None:
    """As a container beside the sidecar's: it may come first, and the sidecar may be replaced."""
    command = [sys.executable, "-m", "sidecar", "hold", "--device", "cuda:1", "--pool", pool_name]
    environ = environment(**machine.environ())
    alone = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        with machine.sidecar(pool_name, folder, args=()) as sidecar:
            resident(sidecar.paths, 1, {B})
            assert the_holder(sidecar.paths) == alone.pid
            second = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
            assert second.returncode == 1 and "has " + B + " already" in second.stderr
            with machine.engine(pool_name) as engine:
                truth = engine(gpu_side.open_on, "cuda:1", "model")
                alone.send_signal(signal.SIGTERM)  # told to stop, it waits for whoever uses its memory
                resident(sidecar.paths, 1, set())
                assert engine(gpu_side.kept) == truth and alone.poll() is None
                engine(gpu_side.forget)
                assert alone.wait(60) == 0
    finally:
        if alone.poll() is None:
            alone.kill()
        alone.communicate()
    assert not machine.log("leak", alone.pid) and not machine.used(B)


@pytest.mark.slow
def test_whoever_asks_a_third_time_means_it(machine: Machine, pool_name: str, folder: Path) -> None:
    """The first signal is for an orderly end, which waits for engines; after the second the next one ends it in any case."""
    command = [sys.executable, "-m", "sidecar", "hold", "--device", "cuda:1", "--pool", pool_name]
    with machine.sidecar(pool_name, folder, args=()) as sidecar:
        alone = subprocess.Popen(command, env=environment(**machine.environ()), stderr=subprocess.DEVNULL)
        try:
            resident(sidecar.paths, 1, {B})
            with machine.engine(pool_name, BALLAST_ON_SIDECAR_LOSS="warn") as engine:
                engine(gpu_side.open_on, "cuda:1", "model")
                for _ in range(2):
                    alone.send_signal(signal.SIGTERM)
                    time.sleep(2)
                    assert alone.poll() is None
                alone.send_signal(signal.SIGTERM)
                assert alone.wait(20) == -signal.SIGTERM
                engine.kill()
        finally:
            if alone.poll() is None:
                alone.kill()
            alone.wait()


@pytest.mark.slow
def test_records_of_dead_holders_are_swept(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder, args=ONE) as sidecar:
        resident(sidecar.paths, 1, {A})
        dead = next(holder.alive(sidecar.paths)).identifier
        sidecar.terminate()
        os.kill(the_holder(sidecar.paths), signal.SIGKILL)
        assert any(dead in name for name in left_behind(pool_name))
        with Sidecar(pool_name, folder) as again:  # without --device: what is dead goes, out of the manifest too
            again.ready("model")
            resident(again.paths, 1, set())
            until(lambda: not any(dead in name for name in left_behind(pool_name)), "the records are swept")


@pytest.mark.slow
def test_two_engines_and_every_kill_in_turn(machine: Machine, pool_name: str, folder: Path) -> None:
    """Two GPUs, two engines with the GPUs in opposite order; sidecar, engine and holder are killed one after the other."""
    with machine.sidecar(pool_name, folder) as first:
        resident(first.paths, 1, {A, B})
        with machine.engine(pool_name) as one, machine.engine(pool_name, CUDA_VISIBLE_DEVICES="1,0") as two:
            truth = one(gpu_side.open_on, "cuda:0", "model")
            assert two(gpu_side.open_on, "cuda:0", "model") == truth
            first.kill()
            assert one(gpu_side.kept) == two(gpu_side.kept) == truth
            with machine.sidecar(pool_name, folder) as second:
                second.ready("model")
                one.kill()
                assert two(gpu_side.kept) == truth
                with machine.engine(pool_name) as again:
                    assert again(gpu_side.open_on, "cuda:0", "model") == truth
                    os.kill(the_holder(second.paths), signal.SIGKILL)
                    two.wait(30)
                    again.wait(30)
                resident(second.paths, 1, {A, B})
                with machine.engine(pool_name) as last:
                    assert last(gpu_side.open_on, "cuda:1", "model") == truth
                    assert machine.log("open", last.pid)
