"""vLLM as people run it: the `vllm` command with its processes, two ranks, and Ballast's commands around it."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PYTHON, SITE, engine_environment, run

from engine_shim.handoff.catalog import ENGINE, READY
from sidecar.parity import Engine, ask
from sidecar.parity import _until_healthy as until_healthy
from tests.conftest import left_behind
from tests.processes import ROOT, Sidecar

VLLM = str(Path(PYTHON).with_name("vllm"))
MODEL = "llama-tied"
SMALL = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "2"]
ATTACHED = "comes from memory as it was after loading"


@pytest.fixture
def served(checkpoints: Path) -> Iterator[Sidecar]:
    pool = f"t-vllm-{secrets.token_hex(4)}"
    with Sidecar(pool, checkpoints / MODEL, checkpoints / "qwen3-moe") as sidecar:
        sidecar.ready(MODEL)
        sidecar.ready("qwen3-moe")
        yield sidecar
        sidecar.interrupt()
    assert not left_behind(pool)


def command(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *args], env=env, capture_output=True, text=True, timeout=800, cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_prepare_and_then_the_server_attaches_with_plugins_filtered(served: Sidecar, checkpoints: Path) -> None:
    model = str(checkpoints / MODEL)
    environ = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="")
    environ.pop("VLLM_CPU_CI_ENV")  # the engine's processes are spawned, and warm up
    pool = served.paths.pool
    done = command("prepare", "--pool", pool, "--timeout", "400", "--", VLLM, "serve", model, *SMALL, env=environ)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.startswith(f"{MODEL}, target, rank 0: its state is generation")
    assert [g.kind for g in served.catalog.of_model(MODEL, READY)].count(ENGINE) == 1
    again = command("prepare", "--pool", pool, "--timeout", "400", "--", VLLM, "serve", model, *SMALL, env=environ)
    assert (again.returncode, again.stdout) == (0, f"{MODEL}, target, rank 0: its state was there already\n")
    right, _ = run([{"model": model, "prompts": ["The capital of France is"], "tokens": 8}])
    with socket.socket() as free, tempfile.TemporaryFile() as output:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = [VLLM, "serve", model, *SMALL, "--port", str(port)]
        with Engine(words, {**environ, "BALLAST_POOL": pool, "BALLAST_MODE": "require"}, output) as engine:
            until_healthy(f"http://127.0.0.1:{port}", engine, 400)
            answer = ask(f"http://127.0.0.1:{port}", 8)
        output.seek(0)
        log = output.read().decode(errors="replace")
    assert ATTACHED in log, log[-6000:]
    assert len(answer[0][1]) == len(right[0]["tokens"][0]) == 8


def test_two_ranks_have_a_state_each(served: Sidecar, checkpoints: Path) -> None:
    pool = served.paths.pool
    for model in (MODEL, "qwen3-moe"):
        job = {"model": str(checkpoints / model), "args": {"tensor_parallel_size": 2}}
        environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        disk, _ = run([job], None, **environ)
        first, _ = run([job], pool, **environ)
        again, logs = run([job], pool, **environ)
        assert first[0]["tokens"] == disk[0]["tokens"]
        assert again[0]["tokens"] == disk[0]["tokens"]
        assert logs[0].count(ATTACHED) == 2, logs[0][-6000:]
        assert [g.kind for g in served.catalog.of_model(model, READY)].count(ENGINE) == 2


def test_parity_of_the_command_line(checkpoints: Path) -> None:
    environ = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="")
    environ["PYTHONPATH"] = str(SITE)
    model = str(checkpoints / MODEL)
    done = command("parity", "--tokens", "8", "--timeout", "400", "--", VLLM, "serve", model, *SMALL, env=environ)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split()[0] for line in lines] == ["disk", "checkpoint", "publishing", "attached"]
    assert "equal (loaded;" in lines[3]
