"""`ballast serve` as people and supervisors start and stop it."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_shim.handoff.catalog import FAILED
from tests import checkpoints
from tests.cli.conftest import Make
from tests.conftest import left_behind
from tests.processes import Sidecar, ballast, environment


def test_several_models_named_by_their_paths(make: Make, pool_name: str) -> None:
    with Sidecar(pool_name, make("a"), make("b"), make("c") / "model.safetensors") as sidecar:
        for name in "abc":
            assert sidecar.ready(name).total > 0


def test_names_in_order(make: Make, pool_name: str) -> None:
    args = ["--name", "org/base-1.0_x", "-n", "2nd"]
    with Sidecar(pool_name, make("a"), make("b"), args=args) as sidecar:
        sidecar.ready("org/base-1.0_x")
        sidecar.ready("2nd")


@pytest.mark.parametrize("pool", ["A", "0", "a-b_C9", "x" * 40])
def test_odd_but_legal_pool_names(make: Make, pool_name: str, pool: str) -> None:
    name = f"{pool}-{pool_name}"[:64]
    with Sidecar(name, make("m")) as sidecar:
        sidecar.ready("m")
        assert ballast("wait", "m", "--pool", name, "-t", "0").returncode == 0
    assert left_behind(name) == []


def test_a_pool_whose_name_begins_like_another(make: Make, pool_name: str) -> None:
    checkpoint = make("m")
    with Sidecar(pool_name, checkpoint) as one, Sidecar(f"{pool_name}-2", checkpoint) as other:
        one.ready("m")
        other.ready("m")
        other.interrupt()
        assert left_behind(f"{pool_name}-2") == []
        assert ballast("verify", "-p", pool_name).returncode == 0


def test_two_sidecars_on_one_pool(served: Sidecar, make: Make, pool_name: str) -> None:
    done = ballast("serve", make("n"), "--pool", pool_name)
    assert done.returncode == 1
    assert "another sidecar already serves pool" in done.stderr.splitlines()[-1]
    assert served.ready("m").number == 1


def test_sigterm_keeps_and_the_next_adopts(make: Make, pool_name: str) -> None:
    checkpoint = make("m")
    with Sidecar(pool_name, checkpoint) as sidecar:
        number = sidecar.ready("m").number
        assert sidecar.terminate() == 0
    assert left_behind(pool_name)
    with Sidecar(pool_name, checkpoint) as sidecar:
        assert sidecar.ready("m").number == number
        sidecar.says("adopted m")


def test_sigint_removes(served: Sidecar, pool_name: str) -> None:
    assert served.interrupt() == 0
    assert left_behind(pool_name) == []


@pytest.mark.parametrize(
    ("on_exit", "number", "keeps"),
    [
        ("remove", signal.SIGTERM, False),
        ("remove", signal.SIGINT, False),
        ("keep", signal.SIGTERM, True),
        ("keep", signal.SIGINT, True),
    ],
)
def test_on_exit_overrides(make: Make, pool_name: str, on_exit: str, number: int, keeps: bool) -> None:
    with Sidecar(pool_name, make("m"), args=["--on-exit", on_exit]) as sidecar:
        sidecar.ready("m")
        assert sidecar.signal(number) == 0
    assert bool(left_behind(pool_name)) is keeps
    if keeps:
        assert ballast("purge", "-p", pool_name).returncode == 0


def test_nothing_that_can_be_served(tmp_path: Path, pool_name: str) -> None:
    done = ballast("serve", tmp_path / "nowhere", "--pool", pool_name)
    assert done.returncode == 1
    assert "nowhere does not exist" in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind(pool_name) == []


def test_one_bad_checkpoint_does_not_take_the_other_down(make: Make, tmp_path: Path, pool_name: str) -> None:
    with Sidecar(pool_name, tmp_path / "nowhere", make("m")) as sidecar:
        sidecar.ready("m")
        assert "nowhere does not exist" in sidecar.ready("nowhere", FAILED).reason


def test_a_directory_that_is_not_there(make: Make, tmp_path: Path, pool_name: str) -> None:
    done = ballast("serve", make("m"), "--pool", pool_name, "--dir", tmp_path / "shm")
    assert done.returncode == 3
    assert "mount a memory file system there" in done.stderr


def test_says_which_files_it_leaves_out(make: Make, pool_name: str) -> None:
    checkpoint = make("m")
    checkpoints.write(checkpoint / "model.fp16.safetensors", {"x": checkpoints.entry("F16", (2,))})
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        sidecar.says("model.fp16.safetensors")


def test_its_process_is_small_and_has_no_torch(served: Sidecar) -> None:
    with open(f"/proc/{served.pid}/maps") as maps:
        assert "torch" not in maps.read()
    with open(f"/proc/{served.pid}/smaps_rollup") as lines:
        rss = next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    assert rss < 64 * 1024  # KiB


def test_a_log_that_nobody_reads_does_not_stop_it(make: Make, pool_name: str) -> None:
    checkpoint = make("m")
    read, write = os.pipe()
    command = [sys.executable, "-m", "sidecar", "serve", str(checkpoint), "--pool", pool_name]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=write, stderr=write)
    os.close(write)
    os.close(read)
    try:
        assert ballast("wait", "m", "-p", pool_name, "-t", "30").returncode == 0
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_bar_on_a_terminal(tmp_path: Path, pool_name: str) -> None:
    """Large enough to be seen being loaded; Ctrl-C as a terminal sends it."""
    size = 64 << 20
    checkpoints.write(tmp_path / "big.safetensors", {"w": ("U8", (size,), bytes(size))})
    child, terminal = pty.fork()
    if child == 0:
        command = [sys.executable, "-m", "sidecar", "serve", str(tmp_path / "big.safetensors"), "--pool", pool_name]
        os.execve(sys.executable, command, environment(COLUMNS="100", TERM="xterm"))
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while b"is ready" not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 1 << 16)
        os.write(terminal, b"\x03")
        while time.monotonic() < deadline:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:  # the terminal is gone with its last process
                break
    finally:
        os.close(terminal)
        _, code = os.waitpid(child, 0)
    text = shown.decode()
    assert code == 0, text
    assert "64.0 MiB" in text and "%" in text
    assert "ballast: big is ready" in text
    assert "the pool is removed" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is shown again
