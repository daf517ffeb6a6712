"""`ballast wait`, as containers' probes and start scripts use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.cli.conftest import Make
from tests.processes import Sidecar, ballast, environment


def start(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sidecar", "wait", *args]
    return subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_ready_is_code_0_and_silent(served: Sidecar, pool_name: str) -> None:
    for name in (["m"], []):
        done = ballast("wait", *name, "--pool", pool_name, "--timeout", "0")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_waits_for_a_pool_that_comes_later(make: Make, pool_name: str) -> None:
    named, unnamed = start("m", "-p", pool_name), start("-p", pool_name)
    time.sleep(1)
    assert (named.poll(), unnamed.poll()) == (None, None)
    with Sidecar(pool_name, make("m")) as sidecar:
        assert ended(named) == (0, "")
        assert ended(unnamed) == (0, "")
        sidecar.ready("m", timeout=0)


def test_says_what_is_missing_after_the_time(served: Sidecar, pool_name: str) -> None:
    began = time.monotonic()
    done = ballast("wait", "other", "-p", pool_name, "-t", "1")
    assert time.monotonic() - began >= 1
    assert done.returncode == 3
    assert (
        done.stderr == f"ballast: after 1 s, pool {pool_name!r} holds m and not 'other': name it in 'ballast serve'\n"
    )


def test_waits_for_every_model_if_none_is_named(make: Make, tmp_path: Path, pool_name: str) -> None:
    """One of them is a pipe's content away from being there: its file appears while the sidecar is looking."""
    late = tmp_path / "late"
    with Sidecar(pool_name, make("m"), late) as sidecar:
        sidecar.ready("m")
        done = ballast("wait", "-p", pool_name, "-t", "30")
        assert done.returncode == 1
        assert "could not load 'late'" in done.stderr
        assert ballast("wait", "m", "-p", pool_name, "-t", "0").returncode == 0


def test_a_model_that_cannot_be_loaded_is_code_1_with_the_reason(make: Make, tmp_path: Path, pool_name: str) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes(b"\x80\x04pickled")
    waiting = start("bad", "-p", pool_name)
    with Sidecar(pool_name, make("m"), bad) as sidecar:
        sidecar.ready("m")
        code, said = ended(waiting)
    assert code == 1
    assert said.startswith("ballast: the sidecar could not load 'bad': ") and said.count("\n") == 1


def test_a_dead_sidecar_is_waited_for(make: Make, tmp_path: Path, pool_name: str) -> None:
    """Its pool can be attached to; what it had not finished comes with the next."""
    checkpoint = make("m")
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        sidecar.kill()
    assert ballast("wait", "m", "-p", pool_name, "-t", "0").returncode == 0
    done = ballast("wait", "n", "-p", pool_name, "-t", "0")
    assert done.returncode == 3
    assert "its sidecar is gone" in done.stderr
    waiting = start("n", "-p", pool_name)
    os.rename(checkpoint, checkpoint.with_name("n"))
    with Sidecar(pool_name, checkpoint.with_name("n")):
        assert ended(waiting) == (0, "")


def test_ctrl_c_is_clean(pool_name: str) -> None:
    waiting = start("-p", pool_name)
    time.sleep(1)
    waiting.send_signal(2)
    assert ended(waiting) == (130, "")
