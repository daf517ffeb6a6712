"""A real sidecar and real engines: every way in, two at once, updates of the files, and writes that stay private."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.handoff import attachment
from engine_shim.handoff.catalog import RETIRED
from engine_shim.handoff.names import PoolPaths
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong import engine_side
from tests.never_wrong.engine_side import FILE_WAYS, MODEL_WAYS
from tests.never_wrong.forked import Engine, engines
from tests.processes import ROOT, Sidecar, ballast, environment

SIZE = 400_000  # bytes of each large tensor: enough to tell a copy from a map


def write_model(folder: Path, seed: int) -> Path:
    """Two files that differ from those of any other seed in content alone."""
    folder.mkdir(exist_ok=True)
    for number in range(2):
        tensors = {
            f"large{number}": entry("BF16", (SIZE // 2,), 10 * seed + number),
            f"scalar{number}": entry("F32", (), 10 * seed + number),
            f"matrix{number}": entry("F16", (33, 7), 10 * seed + number),
        }
        Checkpoint(tensors, {"format": "pt"}).write(folder / f"model-{number}.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def files(folder: Path) -> list[str]:
    return [str(folder / f"model-{number}.safetensors") for number in range(2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 1)


@pytest.fixture
def plain() -> Iterator[Engine]:
    """An engine without Ballast: what it reads is the truth."""
    with Engine() as engine:
        yield engine


def truth(plain: Engine, folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in files(folder):
        found.update(plain(engine_side.load, "safe_open", path))
    return found


def load_all(engine: Engine, folder: Path, way: str = "safe_open", keep: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for number, path in enumerate(files(folder)):
        found.update(engine(engine_side.load, way, path, f"{keep}{number}" if keep else ""))
    return found


def test_two_engines_at_once_in_every_way(pool_name: str, folder: Path, plain: Engine) -> None:
    expected = truth(plain, folder)
    with Sidecar(pool_name, folder) as sidecar, engines(pool_name, 2) as both:
        sidecar.ready("model")
        for way in FILE_WAYS:
            for path in files(folder):
                for engine in both:
                    engine.start(engine_side.load, way, path, f"{way} {path}")
                for engine in both:
                    found = engine.result()
                    assert found and found == {name: expected[name] for name in found}, way
        for way in MODEL_WAYS:
            for engine in both:
                engine.start(engine_side.load, way, "model", way)
            for engine in both:
                assert engine.result() == expected, way
        for engine in both:
            mapped = engine(engine_side.segments)
            assert set(mapped) == {f"ballast-{pool_name}.g1.w0", f"ballast-{pool_name}.g1.w1"}
            # Nothing was copied, except by `load_model`, whose business it is to copy into the module's own memory.
            assert sum(mapped.values()) == 0
            assert [line.split(":")[0] for line in engine.lines] == ["model comes from memory"]
        records = [name for name in sidecar.paths.objects() if name.kind == "attachment"]
        assert len(records) == 2
        assert sidecar.interrupt() == 0


def test_writes_stay_private(pool_name: str, folder: Path, plain: Engine) -> None:
    expected = truth(plain, folder)
    with Sidecar(pool_name, folder) as sidecar, engines(pool_name, 2) as (writer, reader):
        sidecar.ready("model")
        for engine in (writer, reader):
            load_all(engine, folder, keep="kept")
            assert engine(engine_side.load, "open", "model", "opened") == expected
        for name in ("kept0", "kept1", "opened"):
            changed = writer(engine_side.scribble, name)
            assert changed and not set(changed.items()) & set(expected.items())
        assert sum(writer(engine_side.segments).values()) > SIZE
        # Neither in the same process,
        assert load_all(writer, folder) == expected
        assert writer(engine_side.load, "open", "model") == expected
        # nor in the other, neither what it has already nor what it loads now,
        for name in ("kept0", "kept1", "opened"):
            assert reader(engine_side.kept, name).items() <= expected.items()
        assert load_all(reader, folder) == expected
        # nor in the pool, nor in the files.
        verified = ballast("verify", "--pool", pool_name)
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert truth(plain, folder) == expected
        # And the writer keeps what it wrote.
        assert writer(engine_side.kept, "opened") == changed
        assert sidecar.interrupt() == 0


def test_damage_in_the_pool_is_found(pool_name: str, folder: Path) -> None:
    """That `verify` above says something."""
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        path = PoolPaths(pool_name).segment(1, 0)
        os.chmod(path, 0o600)
        with open(path, "r+b") as file:
            file.seek(1000)
            file.write(b"\xff\x00\xff")
        os.chmod(path, 0o400)
        verified = ballast("verify", "--pool", pool_name)
        assert verified.returncode == 1
        assert "large0" in verified.stdout + verified.stderr
        assert "large1" not in verified.stdout + verified.stderr
        assert sidecar.interrupt() == 0


# Updates


def test_new_weights_at_the_same_path(pool_name: str, tmp_path: Path, folder: Path, plain: Engine) -> None:
    """Each engine has one version, whole: who was there before keeps the old, who comes later gets the new."""
    old = truth(plain, folder)
    with Sidecar(pool_name, folder) as sidecar, Engine(pool_name) as before:
        sidecar.ready("model")
        assert before(engine_side.load, "open", "model", "kept") == old
        assert load_all(before, folder, keep="file") == old

        # As a download or save_pretrained does it: written aside, then renamed.
        write_model(tmp_path / "new", 2)
        for path in files(tmp_path / "new"):
            os.rename(path, folder / Path(path).name)
        new = truth(plain, folder)
        assert not set(new.items()) & set(old.items())

        # At once, long before the sidecar has loaded them, nobody is given the old for the new.
        with Engine(pool_name, BALLAST_WAIT="0") as early:
            assert load_all(early, folder) == new
            assert len(early.lines) == 1 and "took the place of what the sidecar read" in early.lines[0]

        generation = sidecar.ready("model", above=1)
        with Engine(pool_name) as after:
            assert load_all(after, folder) == new
            assert after(engine_side.load, "open", "model") == new
            assert [line.split(" (")[0] for line in after.lines] == [
                f"model comes from memory: generation {generation.number} of pool {pool_name}"
            ]
        assert before(engine_side.kept, "kept") == old
        assert {**before(engine_side.kept, "file0"), **before(engine_side.kept, "file1")} == old
        # The same engine, when it loads again, gets what is there now.
        assert load_all(before, folder) == new

        # In place, too, and the two oldest versions in use or not: two are kept, an older one goes when nobody holds it.
        write_model(folder, 3)
        newest = sidecar.ready("model", above=generation.number)
        assert newest.total == generation.total
        with Engine(pool_name) as after:
            assert load_all(after, folder) == truth(plain, folder)
        assert before(engine_side.kept, "kept") == old
        deadline = time.monotonic() + 10
        while (first := sidecar.catalog.get(1)) is None or first.state != RETIRED:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sidecar.paths.segment(1, 0).exists()
        before.kill()
        while sidecar.catalog.get(1) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert not sidecar.paths.segment(1, 0).exists() and not sidecar.paths.manifest(1).exists()
        assert sidecar.paths.segment(generation.number, 0).exists()
        assert sidecar.interrupt() == 0


def test_files_that_are_touched_but_not_changed(pool_name: str, folder: Path, plain: Engine) -> None:
    """No second copy is made, and they are served again once the sidecar has looked."""
    expected = truth(plain, folder)
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        inode = os.stat(sidecar.paths.segment(1, 0)).st_ino
        for path in files(folder):
            shutil.copy(path, path + ".part")
            os.rename(path + ".part", path)  # a mirror that was synchronised anew
            os.utime(path)
        sidecar.says("was touched but not changed: generation 1 stays")
        with Engine(pool_name, BALLAST_MODE="require") as engine:
            assert load_all(engine, folder) == expected
        assert os.stat(sidecar.paths.segment(1, 0)).st_ino == inode
        assert [name.file for name in sidecar.paths.objects() if name.kind == "segment"] == [
            sidecar.paths.segment(1, number).name for number in range(2)
        ]
        assert [g.state for g in sidecar.catalog.generations] == ["ready"]
        assert sidecar.interrupt() == 0


# Elsewhere, and otherwise


def test_workers_that_an_engine_forks(pool_name: str, folder: Path, plain: Engine) -> None:
    """They have their parent's maps and make attachments of their own; the weights stay until the last of them is gone."""
    expected = truth(plain, folder)
    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        with Engine(pool_name, BALLAST_MODE="require") as engine:
            load_all(engine, folder, keep="kept")
            child, found = engine(engine_side.fork_and_load, files(folder)[0])
            assert found and found.items() <= expected.items()
            assert sorted(record.pid for record in attachment.alive(sidecar.paths)) == sorted([engine.pid, child])
            engine.kill()
            assert child in [record.pid for record in attachment.alive(sidecar.paths)]
            os.kill(child, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while list(attachment.alive(sidecar.paths)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert sidecar.interrupt() == 0


def test_a_pool_in_a_directory_of_its_own(pool_name: str, folder: Path, plain: Engine) -> None:
    """Another memory file system, where nobody's start script wipes it."""
    directory = Path(f"/dev/shm/{pool_name}-elsewhere")
    directory.mkdir()
    try:
        with Sidecar(pool_name, folder, directory=directory) as sidecar:
            sidecar.ready("model")
            with Engine(pool_name, BALLAST_DIR=str(directory), BALLAST_MODE="require") as engine:
                assert load_all(engine, folder) == truth(plain, folder)
            with Engine(pool_name, BALLAST_MODE="require") as engine:
                assert engine(engine_side.attempt, "open", "model")[0] == "NotFound"
            assert {path.name.split(".")[1] for path in directory.iterdir()} == {"ctl", "g1"}
            assert sidecar.interrupt() == 0
        assert not list(directory.iterdir())
    finally:
        shutil.rmtree(directory)


# As a user has it: an ordinary program, the `.pth` file in its environment, nothing else

PROGRAM = """
import hashlib, json, sys
import safetensors.torch, torch
found = {}
for path in sys.argv[1:]:
    for name, tensor in safetensors.torch.load_file(path).items():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
print(json.dumps([found, "engine_shim" in sys.modules]))
"""


def test_an_ordinary_program(pool_name: str, tmp_path: Path, folder: Path, plain: Engine) -> None:
    site, start = tmp_path / "site", tmp_path / "start"
    site.mkdir()
    start.mkdir()
    shutil.copy(ROOT / "engine_shim" / "hooks" / "ballast.pth", site)
    (start / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")

    def run(**more: str) -> subprocess.Popen[str]:
        environ = environment(**more)
        environ["PYTHONPATH"] = f"{start}{os.pathsep}{environ['PYTHONPATH']}"
        command = [sys.executable, "-c", PROGRAM, *files(folder)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with Sidecar(pool_name, folder) as sidecar:
        sidecar.ready("model")
        without, attached = run(), run(BALLAST_POOL=pool_name)
        expected = truth(plain, folder)
        found, said = without.communicate(timeout=120)
        assert (json.loads(found), said, without.returncode) == ([expected, False], "", 0)
        found, said = attached.communicate(timeout=120)
        assert (json.loads(found), attached.returncode) == ([expected, True], 0)
        assert said.startswith("ballast: model comes from memory: generation 1 ") and said.count("\n") == 1
        assert sidecar.interrupt() == 0
