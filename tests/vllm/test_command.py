"""vLLM as people run it: the `vllm` command with its processes, two ranks, and Ballast's commands around it."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import FULL, HERE, PYTHON, SITE, Engine, engine_environment, run

from engine_shim.handoff.catalog import ENGINE, READY
from sidecar.parity import Engine as Server
from sidecar.parity import _until_healthy as until_healthy
from sidecar.parity import ask, compare_trees
from tests.conftest import left_behind
from tests.processes import ROOT, Sidecar

VLLM = str(Path(PYTHON).with_name("vllm"))
MODEL = "llama-tied"
SMALL = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "2"]
ATTACHED = "comes from memory as it was after loading"


@pytest.fixture
def served(checkpoints: Path) -> Iterator[Sidecar]:
    pool = f"t-vllm-{secrets.token_hex(4)}"
    models = (MODEL, "qwen2", "qwen3-moe")
    with Sidecar(pool, *(checkpoints / model for model in models)) as sidecar:
        for model in models:
            sidecar.ready(model)
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
    if FULL:
        environ.pop("VLLM_CPU_CI_ENV")  # and warm up
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
        with Server(words, {**environ, "BALLAST_POOL": pool, "BALLAST_MODE": "require"}, output) as engine:
            until_healthy(f"http://127.0.0.1:{port}", engine, 400)
            answer = ask(f"http://127.0.0.1:{port}", 8)
        output.seek(0)
        log = output.read().decode(errors="replace")
    assert ATTACHED in log, log[-6000:]
    assert len(answer[0][1]) == len(right[0]["tokens"][0]) == 8


# What a start with several processes takes is mostly imports, many times over: the whole table only on request.
PARALLEL = {
    "tensors of experts": ("qwen3-moe", {"tensor_parallel_size": 2}),
    "tensors": (MODEL, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("case", PARALLEL if FULL else [next(iter(PARALLEL))])
def test_two_ranks_have_a_state_each(served: Sidecar, checkpoints: Path, case: str) -> None:
    pool = served.paths.pool
    model, args = PARALLEL[case]
    job = {"model": str(checkpoints / model), "args": args}
    disk, _ = run([job], None, **SPAWNED)
    first, _ = run([job], pool, **SPAWNED)
    two_states(served, model)
    again, logs = run([job], pool, **SPAWNED)
    assert first[0]["tokens"] == disk[0]["tokens"]
    assert again[0]["tokens"] == disk[0]["tokens"]
    assert logs[0].count(ATTACHED) == 2, logs[0][-6000:]


SPAWNED = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def two_states(served: Sidecar, model: str) -> None:
    deadline = time.monotonic() + 30
    while (count := [g.kind for g in served.catalog.of_model(model, READY)].count(ENGINE)) < 2:
        assert time.monotonic() < deadline, served.log
        time.sleep(0.1)
    assert count == 2


@pytest.mark.skipif(not FULL, reason="BALLAST_TEST_VLLM_FULL is not set: three starts with several processes take minutes")
def test_two_stages_have_a_state_each(served: Sidecar, checkpoints: Path, tmp_path: Path) -> None:
    """As far as loading goes: this vLLM's CPU backend ends at its first step in this setting, with Ballast or without."""
    model = "qwen2"
    logs = {}
    for way in ("disk", "first", "again"):
        (tmp_path / way).mkdir()
        job = {
            "model": str(checkpoints / model), "args": {"pipeline_parallel_size": 2}, "fails": True,
            "env": {"BALLAST_PARITY": str(tmp_path / way)},
        }  # fmt: skip
        pool = served.paths.pool if way != "disk" else f"none-{served.paths.pool}"
        with Engine([job], pool, **SPAWNED, BALLAST_WAIT="20" if way != "disk" else "0") as engine:
            engine.finish()
            logs[way] = engine.log
        if way == "first":
            two_states(served, model)
    assert logs["again"].count(ATTACHED) == 2, logs["again"][-6000:]
    for rank in (0, 1):
        for stage in ("loaded", "final"):
            dumps = [json.loads((tmp_path / way / f"target-{rank}-{stage}.json").read_text()) for way in logs]
            assert compare_trees(dumps[0], dumps[1]) == compare_trees(dumps[0], dumps[2]) == []
            assert len(dumps[0]["tensors"]) > 5


def test_parity_of_a_script(served: Sidecar, checkpoints: Path) -> None:
    """The command is any program that runs an engine; its pool is named, since it cannot be seen what it loads."""
    environ = engine_environment()
    environ["PYTHONPATH"] = str(SITE)
    script = [PYTHON, str(HERE / "engine.py"), json.dumps([{"model": str(checkpoints / MODEL), "tokens": 4}])]
    done = command("parity", "--pool", served.paths.pool, "--timeout", "400", "--", *script, env=environ)
    judged(done)


@pytest.mark.skipif(not FULL, reason="BALLAST_TEST_VLLM_FULL is not set: four starts of a server take minutes")
def test_parity_of_a_server(checkpoints: Path) -> None:
    environ = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_PLUGINS="")
    environ["PYTHONPATH"] = str(SITE)
    model = str(checkpoints / MODEL)
    done = command("parity", "--tokens", "8", "--timeout", "400", "--", VLLM, "serve", model, *SMALL, env=environ)
    assert "3 answers equal" in judged(done)


def judged(done: subprocess.CompletedProcess[str]) -> str:
    """The last verdict, after all of them were found good."""
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split()[0] for line in lines] == ["disk", "checkpoint", "publishing", "attached"]
    assert "equal (loaded;" in lines[3]
    return lines[3]
