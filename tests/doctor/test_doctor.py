"""The doctor names what is wrong, by making each thing wrong in real processes and real file systems."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_shim.doctor import isolation
from engine_shim.handoff.names import PoolPaths
from tests import checkpoints
from tests.processes import ROOT, Sidecar, ballast, environment

TENSOR = checkpoints.entry("F32", (64, 64), 1)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python in which nothing is installed."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    directory.mkdir()
    checkpoints.write(directory / "model.safetensors", {"a": TENSOR}, {"format": "pt"})
    (directory / "config.json").write_text("{}")
    return directory


def doctor(pool: str, *options: str, python: str = sys.executable, **more: str) -> tuple[int, list[dict[str, str]]]:
    """What `python -m engine_shim doctor --json` finds in an engine's environment, with `more` in it."""
    site = str(ROOT / "engine_shim" / "hooks" / "site")
    environ = {**os.environ, "PYTHONPATH": site, "BALLAST_POOL": pool, **more}
    done = subprocess.run(
        [python, *options, "-m", "engine_shim", "doctor", "--json"],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == "", done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def one(found: list[dict[str, str]], check: str, verdict: str = "fault") -> dict[str, str]:
    (row,) = [row for row in found if (row["check"], row["verdict"]) == (check, verdict)]
    if verdict == "fault":
        assert row["remedy"]
    return row


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `folder`."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("no file system can be mounted here: run the tests as root, with CAP_SYS_ADMIN")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_all_is_well(pool_name: str, checkpoint: Path) -> None:
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        code, found = doctor(pool_name)
        assert code == 0, found
        assert "is ready: generation 1" in one(found, "model", "ok")["text"]
        assert one(found, "switch", "ok") and one(found, "sidecar", "ok")


def test_the_command_says_it_to_people(pool_name: str, checkpoint: Path) -> None:
    done = ballast("doctor", "--pool", pool_name)
    assert done.returncode == 1
    assert f"fault  pool: there is no pool '{pool_name}'" in done.stdout and "       -> " in done.stdout
    assert "switch" not in done.stdout  # an operator's shell: no shim is expected to be on
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        done = ballast("doctor", "--pool", pool_name)
        assert done.returncode == 0 and f"the sidecar of pool '{pool_name}' lives" in done.stdout, done.stdout
        assert json.loads(ballast("doctor", "--pool", pool_name, "--json").stdout)["faults"] == 0


def test_bad_usage() -> None:
    for args, environ in ((["doctor", "--what"], {}), ([], {}), (["doctor"], {"BALLAST_POOL": "a/b"})):
        done = subprocess.run(
            [sys.executable, "-m", "engine_shim", *args], env={**environment(), **environ}, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -I x.py", "-I"),
        ("/usr/bin/python3.11 -S x.py", "-S"),
        ("python3 -uE x.py", "-E"),
        ("python -IS x.py", "-S"),
        ("python -W ignore -I -m vllm", "-I"),
        ("python -Wignore x.py -I", ""),
        ("python -X dev -S", "-S"),
        ("python -Xdev x.py -S", ""),
        ("python x.py -I", ""),
        ("python -m vllm -I", ""),
        ("python -uc pass -I", ""),
        ("python -mS", ""),
        ("python --check-hash-based-pycs always -I x.py", "-I"),
        ("python - -I", ""),
        ("python -s -B x.py", ""),
        ("pypy3 -S x.py", "-S"),
        ("bash -S x", ""),
        ("", ""),
    ],
)
def test_options_that_keep_the_shim_out(command: str, option: str) -> None:
    assert isolation(command.split()) == option


def test_a_python_that_has_no_shim(pool_name: str, bare_python: str, tmp_path: Path) -> None:
    def switch(*options: str, **more: str) -> dict[str, str]:
        code, found = doctor(pool_name, *options, python=bare_python, **more)
        assert code == 1
        return one(found, "switch")

    assert "-S" in switch("-S")["text"]
    assert "-I or -E" in switch("-E")["text"]
    assert "BALLAST_POOL is not set" in switch(BALLAST_POOL="")["text"]
    assert "BALLAST_MODE=off" in switch(BALLAST_MODE="off")["text"]
    assert "was loaded at start-up" in switch(PYTHONPATH="")["text"]
    (tmp_path / "sitecustomize.py").write_text("")
    hidden = switch(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'engine_shim' / 'hooks' / 'site'}")
    assert str(tmp_path / "sitecustomize.py") in hidden["text"] and "first in PYTHONPATH" in hidden["remedy"]


def test_an_engine_that_runs_isolated(pool_name: str, bare_python: str) -> None:
    environ = {**os.environ, "BALLAST_POOL": pool_name}
    engine = subprocess.Popen([bare_python, "-I", "-c", "input()"], env=environ, stdin=subprocess.PIPE)
    try:
        _, found = doctor(pool_name)
        assert f"process {engine.pid} " in one(found, "processes")["text"]
        assert not [row for row in doctor(f"{pool_name}-other")[1] if row["check"] == "processes"]
    finally:
        engine.communicate(b"\n")


def test_run_says_it_too(bare_python: str, tmp_path: Path) -> None:
    script = tmp_path / "engine"
    script.write_text(f"#!{bare_python} -I\nprint('started')\n")
    script.chmod(0o755)
    for command in ([script], [bare_python, "-S", "-c", "print('started')"]):
        done = ballast("run", "--", *command)
        assert (done.returncode, done.stdout) == (0, "started\n")
        assert "keeps the shim out of it" in done.stderr
        done = ballast("run", "--mode", "require", "--", *command)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    done = ballast("run", "--", bare_python, "-c", "print('started')")
    assert (done.returncode, done.stderr) == (0, "")


def test_run_is_content_with_an_installed_shim(bare_python: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "with", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "with" / "lib").glob("python*/site-packages")
    (site / "ballast.pth").write_text(f"{ROOT}\n")
    done = ballast("run", "--mode", "require", "--", tmp_path / "with" / "bin" / "python", "-I", "-c", "print('started')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")


def test_a_dead_sidecar(pool_name: str, checkpoint: Path) -> None:
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        sidecar.kill()
        code, found = doctor(pool_name)
        assert code == 1 and "no sidecar of pool" in one(found, "sidecar")["text"]
        assert one(found, "model", "ok")
    ballast("purge", "--pool", pool_name, "--force")


def test_a_model_that_failed_or_is_not_there(pool_name: str, checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"\0" * 4)
    with Sidecar(pool_name, checkpoint, broken) as sidecar:
        sidecar.ready("m")
        _, found = doctor(pool_name, BALLAST_MODEL="other")
        texts = [row["text"] for row in found if row["check"] == "model" and row["verdict"] == "fault"]
        assert len(texts) == 2 and "broken could not be loaded" in texts[0] and "BALLAST_MODEL=other" in texts[1]


def test_another_pool(pool_name: str, checkpoint: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "size=8m"), Sidecar(pool_name, checkpoint, directory=tmp_path / "shm") as sidecar:
        sidecar.ready("m")
        _, found = doctor(f"{pool_name}-x", BALLAST_DIR=str(tmp_path / "shm"))
        assert f"which holds {pool_name}" in one(found, "pool")["text"]
        _, found = doctor(pool_name)
        assert "semaphores" in one(found, "pool")["text"] and "BALLAST_DIR" in one(found, "pool")["remedy"]


def test_a_wiped_pool(pool_name: str, checkpoint: Path) -> None:
    """While an engine is attached, which keeps what it has; the sidecar ends, and somebody looks before it is back."""
    program = (
        "import sys, engine_shim; m = engine_shim.open('m'); t = m.tensors['a']; print('attached', flush=True); input();"
        "print(bytes(t.view(-1)[:8].numpy().tobytes()).hex())"
    )
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        engine = subprocess.Popen(
            [sys.executable, "-c", program], env=environment(pool_name),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert engine.stdout is not None
        assert engine.stdout.readline() == "attached\n"
        for path in sidecar.paths.dir.glob(f"*ballast-{pool_name}.*"):
            path.unlink()
        assert sidecar.process.wait(20) == 1
        _, found = doctor(pool_name)
        assert f"wiped under process {engine.pid}" in one(found, "pool")["text"]
        assert "--dir" in one(found, "pool")["remedy"]
        assert engine.communicate("\n")[0] == TENSOR[2][:32].hex() + "\n"


def test_another_dev_shm_and_split_brain(pool_name: str, checkpoint: Path, tmp_path: Path) -> None:
    """As two containers have it: one directory, another file system in it for the sidecar than for us."""
    folder = tmp_path / "shm"
    with mounted(folder, "size=8m"):
        serve = f"mount -t tmpfs -o size=8m tmpfs {folder} && exec {sys.executable} -m sidecar serve {checkpoint}"
        serve += f" --pool {pool_name} --dir {folder}"
        log = (tmp_path / "log").open("w+")
        elsewhere = subprocess.Popen(["unshare", "-m", "sh", "-c", serve], env=environment(), stderr=log, cwd=ROOT)
        try:
            deadline = time.monotonic() + 30
            while "is ready" not in (tmp_path / "log").read_text():
                assert time.monotonic() < deadline and elsewhere.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
            _, found = doctor(pool_name, BALLAST_DIR=str(folder))
            assert "private IPC" in one(found, "pool")["text"]
            assert f"process {elsewhere.pid} " in one(found, "pool")["text"]
            with Sidecar(pool_name, checkpoint, directory=folder) as sidecar:
                sidecar.ready("m")
                assert not [row for row in doctor(pool_name, BALLAST_DIR=str(folder))[1] if row["verdict"] == "fault"]
                sidecar.kill()
                _, found = doctor(pool_name, BALLAST_DIR=str(folder))
                text = one(found, "sidecar")["text"]
                assert "split brain" in text and f"process {elsewhere.pid} " in text
                assert "never restarts" in one(found, "sidecar")["remedy"]
            ballast("purge", "--pool", pool_name, "--dir", folder, "--force")
        finally:
            elsewhere.terminate()
            elsewhere.wait(20)
            log.close()


def test_what_a_container_gets_by_default(pool_name: str, checkpoint: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "shm", "size=64m") as folder:
        _, found = doctor(pool_name, BALLAST_DIR=str(folder))
        assert "shm_size" in one(found, "shared memory")["remedy"]
        with Sidecar(pool_name, checkpoint, directory=folder) as sidecar:
            sidecar.ready("m")
            _, found = doctor(pool_name, BALLAST_DIR=str(folder))
            assert "64.00 MiB" in one(found, "shared memory", "note")["text"]


def test_file_systems_that_will_not_do(pool_name: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "ro", "size=1m,ro") as folder:
        assert "read-only" in one(doctor(pool_name, BALLAST_DIR=str(folder))[1], "shared memory")["text"]
    with mounted(tmp_path / "full", "size=64k") as folder:
        (folder / "other").write_bytes(b"\0" * 65536)
        assert "is full" in one(doctor(pool_name, BALLAST_DIR=str(folder))[1], "room")["text"]
    with mounted(tmp_path / "open", "size=8m,mode=0777") as folder:
        assert "everybody may remove" in one(doctor(pool_name, BALLAST_DIR=str(folder))[1], "shared memory", "note")["text"]
    assert "is not there" in one(doctor(pool_name, BALLAST_DIR=str(tmp_path / "none"))[1], "shared memory")["text"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user: run the tests as root")
def test_another_user(pool_name: str, checkpoint: Path) -> None:
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        os.chown(sidecar.paths.control, 12345, -1)
        _, found = doctor(pool_name)
        assert "belongs to user 12345 and this is user 0" in one(found, "owner")["text"]
        assert "runAsUser" in one(found, "owner")["remedy"]
        os.chown(sidecar.paths.control, 0, -1)


def test_another_version(pool_name: str, checkpoint: Path) -> None:
    with Sidecar(pool_name, checkpoint) as sidecar:
        sidecar.ready("m")
        sidecar.terminate()
        path = PoolPaths(pool_name).control
        data = bytearray(path.read_bytes())
        data[8] = 99
        path.write_bytes(data)
        _, found = doctor(pool_name)
        assert "layout 99" in one(found, "pool")["text"] and "same version" in one(found, "pool")["remedy"]
        path.unlink()
        ballast("purge", "--pool", pool_name, "--force")


def test_one_check_that_fails_hides_no_other(pool_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine_shim import doctor as examination

    def broken(here: Any) -> Iterator[examination.Finding]:
        raise RuntimeError("no")

    monkeypatch.setattr(examination, "_versions", broken)
    found = examination.findings(PoolPaths(pool_name), {"BALLAST_POOL": pool_name})
    assert found[0].verdict == "note" and "RuntimeError" in found[0].text and len(found) > 4
