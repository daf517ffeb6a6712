"""`ballast inject`: one folder on PYTHONPATH, for any Python from 3.9 on, that changes as a whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import subprocess
import sys
import threading
import venv
from pathlib import Path

import pytest

from sidecar import inject as injecting
from sidecar.inject import SHIM, InjectionRefused, inject
from tests.processes import ballast

HOOKED = "import json, sys; print(json.dumps([type(f).__name__ for f in sys.meta_path][0]))"


def pythons() -> list[str]:
    """Every Python from 3.9 on that is on this machine: this one, those on PATH, those of pyenv."""
    found = {}
    versions = os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions")
    for minor in range(9, 15):
        name = f"python3.{minor}"
        for path in [shutil.which(name), *sorted(glob.glob(f"{versions}/3.{minor}.*/bin/{name}"))]:
            if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
                found[minor] = path
    return [found[minor] for minor in sorted(found)] or [sys.executable]


def start(python: str, folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a Python that has nothing but the folder, as an engine's container has it."""
    return subprocess.run(
        [python, *args], env={"PYTHONPATH": str(folder), **environ}, cwd="/", capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")


@pytest.mark.parametrize("python", pythons())
def test_switches_on_in_every_python(python: str, volume: Path) -> None:
    """Every module of the protocol imports there, with the standard library alone; without BALLAST_POOL nothing is loaded."""
    inject(volume)
    done = start(python, volume, "-c", HOOKED, BALLAST_POOL="t6-none")
    assert (json.loads(done.stdout), done.stderr) == ("HookingFinder", "")
    modules = [
        path.relative_to(SHIM.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        for path in [*(SHIM / "handoff").glob("*.py"), SHIM / "doctor.py", SHIM / "ladder.py", SHIM / "hooks" / "bootstrap.py"]
    ]
    wanted = [name for name in modules if name != "engine_shim.ladder"]  # which goes on to torch
    done = start(python, volume, "-W", "error", "-c", f"import {', '.join(wanted)}; print('all')")
    assert (done.stdout, done.stderr) == ("all\n", "")
    done = start(python, volume, "-c", "import sys; print('engine_shim' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


# Instead of torch, which not every Python here has: whatever is asked of it when a module is imported is there.
EVERYTHING = """
import sys
class Torch(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Torch(name, (), {})
for name in ("torch", "torch.multiprocessing.reductions", "torch.overrides"):
    sys.modules[name] = Torch(name, (), {})
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
print("all")
"""


@pytest.mark.parametrize("python", pythons())
def test_all_of_it_imports_in_every_python(python: str, volume: Path) -> None:
    """What needs torch too: no spelling is too new for the oldest, nothing of the standard library too old for the newest."""
    inject(volume)
    paths = [path.relative_to(SHIM.parent).with_suffix("") for path in SHIM.rglob("*.py")]
    names = [path.as_posix().replace("/", ".").removesuffix(".__init__") for path in paths if path.name != "__main__.py"]
    names = [name for name in names if not name.endswith("sitecustomize")]
    done = start(python, volume, "-W", "error", "-c", EVERYTHING, *names)
    assert (done.stdout, done.stderr) == ("all\n", "") and len(names) > 25


@pytest.mark.parametrize("python", pythons())
def test_the_doctor_comes_with_it(python: str, volume: Path) -> None:
    inject(volume)
    done = start(python, volume, "-m", "engine_shim", "doctor", "--json", BALLAST_POOL="t6-none")
    found = {row["check"]: row["verdict"] for row in json.loads(done.stdout)["findings"]}
    assert (done.returncode, found["switch"], found["pool"]) == (1, "ok", "fault")


def test_an_old_python_is_left_alone(volume: Path) -> None:
    versions = os.path.join(os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv")), "versions")
    old = [path for minor in (7, 8) for path in glob.glob(f"{versions}/3.{minor}.*/bin/python3.{minor}")]
    if not old:
        pytest.skip("no Python 3.7 or 3.8 here: install one with pyenv")
    inject(volume)
    for python in old:
        done = start(python, volume, "-c", "print('started')", BALLAST_POOL="t6-none")
        assert (done.stdout, done.stderr) == ("started\n", "")
        done = start(python, volume, "-m", "engine_shim", "doctor", BALLAST_POOL="t6-none")
        assert done.returncode == 1 and "3.9 or later" in done.stderr


def test_twice_is_as_once(volume: Path) -> None:
    first = inject(volume)
    before = {path: os.lstat(path).st_ino for path in volume.rglob("*")}
    second = inject(volume)
    assert (first.changed, second.changed, first.copy) == (True, False, second.copy)
    assert {path: os.lstat(path).st_ino for path in volume.rglob("*")} == before


def test_the_command(volume: Path, tmp_path: Path) -> None:
    done = ballast("inject", volume)
    assert done.returncode == 0 and "now has the shim" in done.stdout, done.stderr
    assert "already had the shim" in ballast("inject", volume).stdout
    done = ballast("inject", tmp_path / "nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "mount there the volume" in done.stderr and not (tmp_path / "nowhere").exists()


def test_another_user_may_read_it(volume: Path) -> None:
    previous = os.umask(0o077)
    try:
        copy = inject(volume).copy
    finally:
        os.umask(previous)
    paths = list((volume / copy).rglob("*"))
    assert len(paths) > 20
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o644, 0o755}


def test_what_is_somebody_elses_stays(volume: Path) -> None:
    for name in ("sitecustomize.py", "engine_shim"):
        (volume / name).write_text("not ours")
        with pytest.raises(InjectionRefused, match="folder of its own"):
            inject(volume)
        assert (volume / name).read_text() == "not ours" and len(list(volume.iterdir())) == 1
        (volume / name).unlink()


def test_an_update_moves_in_one_step(volume: Path, tmp_path: Path) -> None:
    """An engine that runs goes on importing from the copy that it began with."""
    old = tmp_path / "old" / "engine_shim"
    shutil.copytree(SHIM, old, ignore=shutil.ignore_patterns("__pycache__"))
    (old / "late.py").write_text("from engine_shim.later import WHICH")
    (old / "later.py").write_text("WHICH = 'old'")
    inject(volume, old)
    program = "import engine_shim; print('began', flush=True); input(); import engine_shim.late as l; print(l.WHICH)"
    with subprocess.Popen(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(volume)}, cwd="/",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as engine:  # fmt: skip
        assert engine.stdout is not None
        assert engine.stdout.readline() == "began\n"
        assert inject(volume).changed
        assert start(sys.executable, volume, "-c", "import engine_shim.late").returncode == 1  # the new one has no such module
        assert engine.communicate("\n")[0] == "old\n"


def test_a_start_meanwhile_gets_one_or_the_other(volume: Path, tmp_path: Path) -> None:
    sources = [SHIM, tmp_path / "other" / "engine_shim"]
    shutil.copytree(SHIM, sources[1], ignore=shutil.ignore_patterns("__pycache__"))
    (sources[1] / "extra.py").write_text("")
    inject(volume)
    stop = threading.Event()

    def swap() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            inject(volume, sources[count % 2])

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(15):
            done = start(sys.executable, volume, "-S", "-c", "import engine_shim.doctor; import engine_shim.ladder as l")
            missing = "No module named 'engine_shim" in done.stderr
            assert not missing, done.stderr
    finally:
        stop.set()
        thread.join()
    assert not list(volume.glob(".ballast-*"))


def test_a_damaged_copy_is_put_right_and_leftovers_go(volume: Path) -> None:
    copy = inject(volume).copy
    (volume / copy / "engine_shim" / "ladder.py").write_text("raise SystemExit(1)")
    (volume / ".ballast-0123456789abcdef.tmp").mkdir()
    assert inject(volume).changed
    assert (volume / copy / "engine_shim" / "ladder.py").read_bytes() == (SHIM / "ladder.py").read_bytes()
    assert sorted(path.name for path in volume.iterdir()) == sorted([copy, "engine_shim", "sitecustomize.py"])


def test_what_python_has_cached_is_no_damage(volume: Path) -> None:
    inject(volume)
    start(sys.executable, volume, "-m", "engine_shim", "doctor")
    assert list(volume.rglob("*.pyc"))
    assert not inject(volume).changed


def test_two_at_once(volume: Path) -> None:
    commands = [
        subprocess.Popen([sys.executable, "-c", f"from sidecar.inject import *; inject(Path({str(volume)!r}))"])
        for _ in range(6)
    ]
    assert [command.wait(60) for command in commands] == [0] * 6
    assert len(list(volume.iterdir())) == 3


def test_one_that_stands_still_is_not_waited_for_for_ever(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injecting, "_TURN_WITHIN", 0.2)
    fd = os.open(volume, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(InjectionRefused, match="another 'ballast inject' has been at work"):
        inject(volume)
    assert not list(volume.iterdir())
    os.close(fd)
    assert inject(volume).changed


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a file system read-only: run the tests as root")
def test_a_volume_that_cannot_take_it(tmp_path: Path) -> None:
    volume = tmp_path / "mount"
    volume.mkdir()
    for options, says in (("ro", "mount it writable"), ("size=64k", "make the volume larger")):
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(volume)], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here: give the tests' container CAP_SYS_ADMIN")
        try:
            with pytest.raises(InjectionRefused, match=says):
                inject(volume)
            assert not list(volume.iterdir())
        finally:
            subprocess.run(["umount", str(volume)], check=True)


def test_it_hands_on_to_the_images_own_sitecustomize(bare_python: str, volume: Path, tmp_path: Path) -> None:
    inject(volume)
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "sitecustomize.py").write_text("print('the image')")
    environ = {"PYTHONPATH": f"{volume}{os.pathsep}{tmp_path / 'image'}", "BALLAST_POOL": "t6-none"}
    done = subprocess.run([bare_python, "-c", HOOKED], env=environ, cwd="/", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('the image\n"HookingFinder"\n', "")


def test_the_package_finds_itself_through_the_real_folder(volume: Path) -> None:
    copy = inject(volume).copy
    done = start(sys.executable, volume, "-c", "import engine_shim.handoff as h; print(h.__file__)")
    assert done.stdout.strip() == os.path.realpath(volume / copy / "engine_shim" / "handoff" / "__init__.py")


def test_nothing_of_the_sidecar_is_in_it(volume: Path) -> None:
    injecting.inject(volume)
    names = {path.name for path in volume.rglob("*")}
    assert "cli.py" not in names and "ladder.py" in names
