"""`bench/gpu_check.py` runs to its end: here against the emulated driver, so that it does on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.emulated import MIB, A, Machine
from tests.processes import ROOT, environment


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run(libcuda: Path, tmp_path: Path) -> None:
    machine = Machine(libcuda, {A: 256 * MIB})
    try:
        out = tmp_path / "gpu.json"
        command = [sys.executable, "bench/gpu_check.py", "--emulated", libcuda, "--sizes", "1"]
        command += ["--scratch", tmp_path, "--out", out]
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=environment(**machine.environ()), capture_output=True, text=True, timeout=550
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads(out.read_text())["rows"]
        assert rows["equal tokens"] is True
        assert rows["every byte by digest (ballast verify --device)"] == "intact"
        assert rows["1 MB: every byte is as in host memory"] is True
        assert rows["after kill -9 of the sidecar"] is True
        assert rows["memory of two engines"] == {"context": 0, "first": 0, "second": 0}
        assert rows["1 MB: attach and opening of handles, s"]["shared"] == 1
    finally:
        machine.close()
