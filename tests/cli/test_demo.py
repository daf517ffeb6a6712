"""`ballast demo` shows what it claims, and leaves nothing behind, whatever happens to it."""

from __future__ import annotations

import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from engine_shim.handoff.names import DEFAULT_DIR
from sidecar import demo
from tests.cli.conftest import Make
from tests.processes import environment

needs_the_extra = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in demo.NEEDED), reason="needs the extra 'demo'"
)

# An engine for the demo without torch: it answers, and its weights are nowhere.
ANSWERS = """
import json, sys
print(json.dumps({"load": 0.1, "read": 0.2, "tokens": [1, 2], "text": "Paris"}), flush=True)
sys.stdin.read()
"""
# One that really reads its checkpoint, and never answers twice the same.
WAVERS = """
import json, sys, time
from safetensors.torch import load_file
tensors = load_file(sys.argv[1] + "/model.safetensors")
read = sum(float(tensor.float().sum()) for tensor in tensors.values())
print(json.dumps({"load": 0.1, "read": 0.2, "tokens": [time.time_ns()], "text": "Paris"}), flush=True)
sys.stdin.read()
"""


def in_shared_memory() -> list[str]:
    return [name for name in os.listdir(DEFAULT_DIR) if name.startswith(("ballast-demo-", "sem.ballast-demo-"))]


def left() -> list[str]:
    """What demos have in shared memory, and the directories in which they keep their logs."""
    return in_shared_memory() + [str(path) for path in Path(tempfile.gettempdir()).glob("ballast-demo-*")]


@pytest.fixture
def before() -> list[str]:
    return left()


@pytest.fixture
def staged(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Lets the demo run with an engine that is still to be written to the path returned, on a small checkpoint."""
    checkpoint = make("m")
    engine = tmp_path / "engine.py"
    monkeypatch.setattr(demo, "NEEDED", ())
    monkeypatch.setattr(demo, "ENGINE", engine)
    monkeypatch.setattr(demo, "obtain", lambda cache, console: checkpoint)
    monkeypatch.setattr(demo, "BALLAST", (sys.executable, "-m", "sidecar"))
    return engine


def run_here() -> int:
    return demo.run(Path("unused"), Path(DEFAULT_DIR), Console(file=open(os.devnull, "w")))


def test_says_what_to_install(tmp_path: Path) -> None:
    without = "import importlib.util as u; find = u.find_spec; u.find_spec = lambda n, *a: n != 'torch' and find(n, *a) or None"
    command = [
        sys.executable,
        "-c",
        f"{without}; from sidecar.cli import main; main()",
        "demo",
        "--cache",
        str(tmp_path),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs torch" in done.stderr and "pip install 'ballast-sidecar[demo]'" in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_attach_is_found_out(staged: Path, before: list[str]) -> None:
    staged.write_text(ANSWERS)
    with pytest.raises(demo.DemoFailed, match="its weights do not come from the pool"):
        run_here()
    assert not set(left()) - set(before)


def test_an_engine_that_dies_is_quoted(staged: Path, before: list[str]) -> None:
    staged.write_text("raise SystemExit('out of memory')")
    with pytest.raises(demo.DemoFailed, match="an engine gave no answer: out of memory"):
        run_here()
    assert not set(left()) - set(before)


def test_a_sidecar_that_cannot_serve_is_quoted(
    staged: Path, before: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    staged.write_text(ANSWERS)
    monkeypatch.setattr(demo, "obtain", lambda cache, console: tmp_path / "nowhere")
    with pytest.raises(demo.DemoFailed, match="the sidecar could not serve the checkpoint"):
        run_here()
    assert not set(left()) - set(before)


@pytest.mark.slow
def test_answers_that_differ_are_a_failure(staged: Path, before: list[str]) -> None:
    staged.write_text(WAVERS)
    assert run_here() == 1
    assert not set(left()) - set(before)


def test_a_checkpoint_appears_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    console = Console(file=open(os.devnull, "w"))
    killed = tmp_path / "killed.partial"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")

    def fails(target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise demo.DemoFailed("no")

    monkeypatch.setattr(demo, "_build_apart", fails)
    monkeypatch.setattr(demo.metadata, "version", lambda name: "1")
    with pytest.raises(demo.DemoFailed):
        demo.obtain(tmp_path, console)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]

    monkeypatch.setattr(demo, "_build_apart", lambda target: (target / "config.json").write_text("{}"))
    built = demo.obtain(tmp_path, console)
    assert [path.name for path in built.iterdir()] == ["config.json"]
    monkeypatch.setattr(demo, "_build_apart", fails)
    assert demo.obtain(tmp_path, console) == built


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo.metadata, "version", lambda name: "1")
    (tmp_path / "file").write_text("")
    with pytest.raises(demo.DemoFailed, match="choose --cache"):
        demo.obtain(tmp_path / "file" / "cache", Console())


def test_memory_is_the_kernels_account(tmp_path: Path) -> None:
    path = tmp_path / "weights w0"
    path.write_bytes(bytes(16 * mmap.PAGESIZE))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as private:
        sum(private[:: mmap.PAGESIZE])
        private[0] = 1
        memory = demo.weights_in_memory(os.getpid(), lambda found: found == str(path))
    assert memory == demo.Memory(16 * mmap.PAGESIZE, memory.share, mmap.PAGESIZE)
    assert demo.weights_in_memory(os.getpid(), lambda found: found == str(path)) == demo.Memory(0, 0, 0)


def start(checkpoint: Path, engine: Path, act: int) -> subprocess.Popen[str]:
    """The demo with an engine that never answers in this act: from disk (1), or with a sidecar beside it (2)."""
    engine.write_text(f"import os, time\nif ('BALLAST_POOL' in os.environ) == {act == 2}: time.sleep(600)\n{ANSWERS}")
    program = f"""
        from pathlib import Path
        from sidecar import cli, demo
        demo.NEEDED, demo.ENGINE, demo.obtain = (), Path({str(engine)!r}), lambda *_: Path({str(checkpoint)!r})
        cli.main()
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), "demo"],
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until_act(process: subprocess.Popen[str], act: int) -> None:
    """Returns when the engine of this act has been started."""
    assert process.stdout is not None
    announced = "0" if act == 1 else "2"
    while (line := process.stdout.readline()) and not line.startswith(announced):
        pass
    time.sleep(2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("act", [1, 2])
def test_interrupted_it_leaves_nothing(make: Make, tmp_path: Path, before: list[str], number: int, act: int) -> None:
    process = start(make("m"), tmp_path / "engine.py", act)
    try:
        until_act(process, act)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, said) == (130, "")
    assert not set(left()) - set(before)


def test_killed_it_leaves_nothing_in_shared_memory(make: Make, tmp_path: Path) -> None:
    process = start(make("m"), tmp_path / "engine.py", act=2)
    try:
        until_act(process, 2)
    finally:
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 20
    while in_shared_memory() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_shared_memory() == []


@needs_the_extra
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(os.environ.get("CI")), reason="CI runs `make demo` itself")
def test_the_demo(tmp_path: Path, before: list[str]) -> None:
    command = [sys.executable, "-m", "sidecar", "demo", "--cache", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 3
    assert "The model says: The capital of France is Paris." in done.stdout
    assert not set(left()) - set(before)
