"""SGLang as people run it: its server under both of its names, the offline engine, and Ballast's commands around them, with a
real model."""

from __future__ import annotations

import json
import os
import signal
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
from conftest import ATTACHED, FULL, PYTHON, TWO_RANKS, engine_environment, states

from engine_shim.handoff import attachment
from sidecar.parity import Engine, ask
from sidecar.parity import _until_healthy as until_healthy
from tests.processes import ROOT, Sidecar

SMALL = [
    "--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph", "--max-total-tokens", "2048",
    "--skip-server-warmup", "--dtype", "bfloat16", "--sleep-on-idle",
]  # fmt: skip
TOKENS = 6  # in each answer


def launch(model: Path, *more: str) -> list[str]:
    return [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), *SMALL, *more]


def serve(model: Path, *more: str) -> list[str]:
    """The other name of the same: `sglang serve`, which an installation puts beside its interpreter."""
    return [str(Path(PYTHON).with_name("sglang")), "serve", "--model-path", str(model), *SMALL, *more]


@contextmanager
def served(command: list[str], environ: dict[str, str]) -> Iterator[tuple[str, Any, Engine]]:
    """A server that answers: its address, a function that reads its log, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as output, Engine([*command, "--port", str(port)], environ, output) as engine:

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
    """The plugin alone in one server, the start-up hook alone in the other, which is `sglang serve`."""
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
        with (
            served(serve(smollm2), hooked) as (first, log, _),
            served(launch(smollm2), plugged) as (second, other, _),
        ):
            assert ATTACHED in log() and ATTACHED in other(), log()[-3000:] + other()[-3000:]
            answer = ask(first, TOKENS)
            assert ask(second, TOKENS) == answer
            assert "Paris" in answer[0][0]
            held = [r for r in attachment.alive(sidecar.paths) if r.generation == number]
            assert len(held) == 2 and all(r.engine.startswith("sglang ") for r in held)
            # kill -9 of the sidecar: both go on, and its successor takes over what they hold.
            sidecar.kill()
            assert ask(first, TOKENS) == answer
            with Sidecar(pool, smollm2) as successor:
                successor.ready(name)
                assert states(successor) == [number]
                # Memory is released and taken again as ever: on a CPU SGLang frees none, and says so.
                post(f"{second}/release_memory_occupation", {})
                post(f"{second}/resume_memory_occupation", {})
                assert ask(second, TOKENS) == answer
                told = post(f"{first}/update_weights_from_disk", {"model_path": str(smollm2)})
                assert told["success"], told
                assert ask(first, TOKENS) == answer
                deadline = time.monotonic() + 30
                while not (notes := [r.note for r in attachment.alive(successor.paths) if r.note]):
                    assert time.monotonic() < deadline, log()[-3000:]
                    time.sleep(0.1)
                assert notes == ["no longer shared: update_weights_from_disk"]
                assert ask(second, TOKENS) == answer
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


def equal_everywhere(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert [line.split()[0] for line in lines] == ["disk", "checkpoint", "publishing", "attached"]
    assert all(" equal (" in line for line in lines[1:]) and "equal (loaded;" in lines[3], lines
    return lines


@pytest.mark.timeout(1800)
def test_parity_of_a_server(smollm2: Path) -> None:
    done = command("parity", "--tokens", str(TOKENS), "--timeout", "600", "--", *launch(smollm2), env=engine_environment())
    assert all("and 3 answers equal" in line for line in equal_everywhere(done)[1:]), done.stdout


@FULL
@pytest.mark.timeout(1800)
def test_parity_of_a_server_with_two_ranks(checkpoints: Path) -> None:
    words = launch(checkpoints / "llama-tied", "--tp-size", "2")
    done = command("parity", "--tokens", str(TOKENS), "--timeout", "600", "--", *words, env=engine_environment(**TWO_RANKS))
    assert all("and 3 answers equal" in line for line in equal_everywhere(done)[1:]), done.stdout


OFFLINE = """
import sys
from sglang import Engine
if __name__ == "__main__":
    engine = Engine(
        model_path=sys.argv[2], device="cpu", attention_backend="torch_native", disable_cuda_graph=True,
        max_total_tokens=2048, skip_server_warmup=True, dtype="bfloat16",
    )
    found = engine.generate(["The capital of France is"], {"temperature": 0, "max_new_tokens": 8})
    print(found[0]["text"])
    engine.shutdown()
    assert "Paris" in found[0]["text"], found
"""


@FULL
@pytest.mark.timeout(1800)
def test_parity_of_the_offline_engine(smollm2: Path, tmp_path: Path) -> None:
    """A program that ends by itself: every tensor is compared, and it checks its answer itself."""
    program = tmp_path / "offline.py"
    program.write_text(OFFLINE)
    words = [PYTHON, str(program), "--model-path", str(smollm2)]
    equal_everywhere(command("parity", "--timeout", "600", "--", *words, env=engine_environment()))


@FULL
@pytest.mark.timeout(1800)
def test_a_servers_scheduler_killed_as_it_attaches(smollm2: Path, pool: str) -> None:
    """As soon as its attachment is there: the server ends, as it does when a scheduler dies, and the next one attaches."""
    with Sidecar(pool, smollm2) as sidecar:
        sidecar.ready(smollm2.name)
        with served(launch(smollm2), engine_environment(pool)) as (base, log, _):
            answer = ask(base, TOKENS)
            deadline = time.monotonic() + 60
            while not states(sidecar):
                assert time.monotonic() < deadline, log()[-3000:]
                time.sleep(0.1)
        number = states(sidecar)[0]
        deadline = time.monotonic() + 60
        while any(attachment.alive(sidecar.paths)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with tempfile.TemporaryFile() as output, Engine(launch(smollm2), engine_environment(pool), output) as engine:
            deadline = time.monotonic() + 600
            while not (found := [r.pid for r in attachment.alive(sidecar.paths) if r.generation == number]):
                assert engine.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.0005)
            os.kill(found[0], signal.SIGKILL)
            engine.process.wait(60)
            assert b"The server is fired up" not in os.pread(output.fileno(), 1 << 22, 0)
        assert not any(attachment.alive(sidecar.paths))
        with served(launch(smollm2), engine_environment(pool, BALLAST_MODE="require")) as (base, log, _):
            assert ATTACHED in log() and ask(base, TOKENS) == answer
        sidecar.interrupt()
