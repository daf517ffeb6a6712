"""`bench/gpu_check.py` runs to its end: here against the emulated driver, so that it does on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.emulated import MIB, A, Machine
from tests.processes import ROOT, environment


def check(machine: Machine, tmp_path: Path, *options: str, **environ: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """A run with nothing but the packages that the script names, and what it has written."""
    (tmp_path / "posix_ipc.py").write_text("raise ImportError('not on this machine')\n")
    env = environment(**machine.environ(), **environ)
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    out = tmp_path / "gpu.json"
    command = [sys.executable, "bench/gpu_check.py", "--emulated", str(machine.library), "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550)
    return done, json.loads(out.read_text())["rows"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run(libcuda: Path, tmp_path: Path) -> None:
    machine = Machine(libcuda, {A: 256 * MIB})
    try:
        done, rows = check(machine, tmp_path, "--sizes", "1", "--budget", "480")
        assert done.returncode == 0, done.stdout + done.stderr
        assert rows["equal tokens"] is True
        assert rows["every byte by digest (ballast verify --device)"] == "intact"
        assert rows["1 MB: every byte is as in host memory"] is True
        assert rows["100 MB: one handle"]["right"] is True and rows["100 MB: one handle"]["bytes"] == 0
        assert rows["after kill -9 of the sidecar"] is True
        assert rows["after kill -9 of the holder: an engine with the default policy ends"]["code"] == 75
        assert rows["its bytes are right"] is rows["its bytes are right as well"] is True
        assert rows["attaching to that"]["shared"] == 1 and rows["attaching without a holder, from host memory"]["shared"] == 0
        assert rows["memory of two engines"] == {"context": 0, "first": 0, "second": 0}
        assert rows["1 MB: attach and opening of handles, s"]["shared"] == 1
        assert not [what for what, value in rows.items() if str(value).startswith("not taken") and "torch" not in what]
    finally:
        machine.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_goes_wrong_leaves_the_rest(libcuda: Path, tmp_path: Path) -> None:
    """No handle opens: rows say so, what does not need one is there, nothing is waited for, and the run is a failed one."""
    machine = Machine(libcuda, {A: 64 * MIB})
    try:
        done, rows = check(machine, tmp_path, "--budget", "4", "--sizes", "1", EMU_FAIL="cuIpcOpenMemHandle_v2:201")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "(201)" in rows["1 MB: one handle"] and "64 " not in rows["1 MB: one handle"]
        assert "not taken" in rows["100 MB: one handle"]
        assert rows["pinned rate, GB/s"] > 0
        assert rows["model: this part"] == "not taken: the time was used up"
        assert "1 MB: one handle" in done.stderr.splitlines()[-1]
    finally:
        machine.close()
