"""Real vLLM processes for the tests of this folder. They are skipped where there is no vLLM.

BALLAST_TEST_VLLM_PYTHON names the interpreter of an environment with vLLM in it; by default it is the one that runs pytest.
BALLAST_TEST_VLLM_FULL runs what is left out otherwise, since it takes long.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("BALLAST_TEST_VLLM_PYTHON") or sys.executable
FULL = bool(os.environ.get("BALLAST_TEST_VLLM_FULL"))  # also what takes too long for every submission
SITE = ROOT / "engine_shim" / "hooks" / "site"


def _has_vllm() -> bool:
    spec = importlib.util.find_spec("vllm")
    return sys.executable != PYTHON or (spec is not None and spec.origin is not None)


collect_ignore_glob = [] if _has_vllm() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3600 if FULL else 1500))  # a module's engines all run in its first test


def engine_environment(pool: str | None = None, **more: str) -> dict[str, str]:
    """As a user would have it: one variable, and what makes vLLM small and quick on two cores."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("BALLAST_", "VLLM_"))}
    environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_CPU_CI_ENV="1", BALLAST_LOG="DEBUG",
        PYTHONPATH=os.pathsep.join((str(SITE), str(ROOT))),
    )  # fmt: skip
    if pool is not None:
        environ["BALLAST_POOL"] = pool
    environ.update(more)
    return environ


class Engine:
    """`engine.py` with a list of jobs, and more of them by `do`. `log` is what it wrote so far; `results` what it answered."""

    def __init__(self, jobs: list[dict[str, Any]], pool: str | None = None, **environ: str) -> None:
        self._output = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [PYTHON, str(HERE / "engine.py"), json.dumps(jobs)], env=engine_environment(pool, **environ),
            stdin=subprocess.PIPE, stdout=self._output, stderr=subprocess.STDOUT, cwd="/", text=True,
            start_new_session=True,
        )  # fmt: skip

    @property
    def log(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line.split(" ", 1)[1]) for line in self.log.splitlines() if line.startswith("RESULT ")]

    def logs(self) -> list[str]:
        """The log cut into pieces, one for each job."""
        return ("\n" + self.log).split("\nJOB ")[1:]

    def do(self, *jobs: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
        """Gives it more jobs and waits for them: results, and the log of each."""
        before, stdin = len(self.results), self.process.stdin
        assert stdin is not None
        for job in jobs:
            stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        self.wait_for("DONE", before + len(jobs))
        return self.results[before:], self.logs()[before:]

    def wait_for(self, word: str, count: int, timeout: float = 800) -> None:
        deadline = time.monotonic() + timeout
        while sum(line.split(" ", 1)[0] == word for line in self.log.splitlines()) < count:
            assert self.process.poll() is None, f"the engine ended with {self.process.returncode}:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"no answer after {timeout} s:\n{self.log[-6000:]}"
            time.sleep(0.1)

    def finish(self, timeout: float = 800) -> list[dict[str, Any]]:
        """Waits for the end, which must be an orderly one."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(timeout)
        assert code == 0, f"the engine ended with {code}:\n{self.log[-6000:]}"
        return self.results

    def ready(self, timeout: float = 400) -> dict[str, Any]:
        """Waits for the first answer."""
        self.wait_for("RESULT", 1, timeout)
        return self.results[0]

    def kill(self) -> None:
        """kill -9, of the engine and of whatever it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.kill()
        self._output.close()


def run(jobs: list[dict[str, Any]], pool: str | None = None, **environ: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the jobs in one process to its end: results, and the log of each."""
    with Engine(jobs, pool, **environ) as engine:
        return engine.finish(), engine.logs()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint of every family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cached = os.environ.get("BALLAST_TEST_VLLM_CHECKPOINTS")
    if cached:
        return Path(cached)
    from families import FAMILIES, QUANTISED

    subprocess.run(
        [PYTHON, str(HERE / "families.py"), str(folder), *FAMILIES, *QUANTISED, "adapter"],
        env=engine_environment(), check=True, capture_output=True, timeout=600, cwd="/",
    )  # fmt: skip
    return folder
