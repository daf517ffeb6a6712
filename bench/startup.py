"""What the installed shim costs a Python that does not use it: every start of an interpreter on the machine pays it."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import tempfile
import time
import venv
from pathlib import Path

from bench.measure import Row, Sample, Section, interleave, limit
from bench.processes import ROOT

WITHOUT = "not installed"
OFF = "installed, off"
ON = "installed, on, nothing imported"
IMPORT = "import engine_shim"
NOTHING = "pass"


def startup(starts: int) -> Section:
    """Starts of two interpreters that differ in the `.pth` file alone, in turn."""
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        bare, shimmed = Path(folder, "bare"), Path(folder, "shimmed")
        for path in (bare, shimmed):
            venv.create(path, symlinks=True)
        packages = next(shimmed.glob("lib/python*/site-packages"))
        (packages / "engine_shim").symlink_to(ROOT / "engine_shim")
        (packages / "ballast.pth").write_text((ROOT / "engine_shim" / "hooks" / "ballast.pth").read_text())
        samples = interleave(
            [
                Row(WITHOUT, lambda: _start(bare, NOTHING)),
                Row(OFF, lambda: _start(shimmed, NOTHING)),
                Row(ON, lambda: _start(shimmed, NOTHING, {"BALLAST_POOL": "bench-none"})),
                Row(IMPORT, lambda: _start(shimmed, IMPORT)),
            ],
            starts,
            quiet=True,
        )
        importing = [_import_time(shimmed, IMPORT, "engine_shim") for _ in range(max(5, starts // 20))]
        off, on = (_modules(shimmed, env) for env in ({}, {"BALLAST_POOL": "bench-none"}))
    section = Section(
        "An interpreter's start",
        [
            f"`python -c pass`, {starts} times each, in turn, in two environments that differ in the `.pth` file and the "
            "package alone; milliseconds, least and median, of wall clock and of the processor."
        ],
        ["", "least", "median", "processor, median", "more than not installed (medians)"],
    )
    for label in (WITHOUT, OFF, ON, IMPORT):
        wall, processor = samples.values(label, "wall"), samples.values(label, "processor")
        more = statistics.median(wall) - samples.median(WITHOUT, "wall")
        section.table.append([label, *(f"{1e3 * v:.2f} ms" for v in (min(wall), statistics.median(wall))),
                              f"{1e3 * statistics.median(processor):.2f} ms", f"{1e3 * more:+.2f} ms"])  # fmt: skip
    paired = [b - a for a, b in zip(samples.values(WITHOUT, "wall"), samples.values(OFF, "wall"), strict=True)]
    section.ratios = [
        limit(
            "start with the shim installed and off, more than without it", [1e3 * statistics.median(paired)], 1.0, "ms"
        ),
        limit("`import engine_shim`, by -X importtime", [1e3 * took for took in importing], 1.0, "ms"),
        limit("modules of torch or of ours after a start with the shim off", [len(off)], 0, "count"),
    ]
    section.facts = {"modules of ours or torch's after a start": {"off": off, "on": on}}
    section.samples = samples.rows
    return section


def _environment(more: dict[str, str] | None = None) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BALLAST_", "PYTHON"))}
    return clean | (more or {})


def _start(environment: Path, code: str, more: dict[str, str] | None = None) -> Sample:
    env = _environment(more)
    began = time.perf_counter()
    pid = os.posix_spawn(environment / "bin" / "python", [str(environment / "bin" / "python"), "-c", code], env)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - began
    if status:
        raise SystemExit(f"python -c {code!r} failed")
    return {"wall": wall, "processor": usage.ru_utime + usage.ru_stime}


def _import_time(environment: Path, code: str, module: str) -> float:
    """Seconds that importing `module` took with all that it imports, by the interpreter's own account."""
    run = subprocess.run(
        [environment / "bin" / "python", "-X", "importtime", "-c", code], env=_environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    found = re.search(rf"\|\s*(\d+) \| {module}$", run.stderr, re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1e6


def _modules(environment: Path, more: dict[str, str]) -> list[str]:
    code = (
        "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'engine_shim', 'sidecar')))"
    )
    run = subprocess.run(
        [environment / "bin" / "python", "-c", code], env=_environment(more), capture_output=True, text=True, check=True
    )
    return run.stdout.split()
