"""`ballast run`: the engine's own signals, streams and exit code, and the shim in whatever Python the engine has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path

import pytest

from tests.cli.conftest import Make
from tests.processes import ROOT, Sidecar, ballast, environment

SITE = ROOT / "engine_shim" / "hooks" / "site"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment in which nothing is installed."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False, symlinks=True)
    return str(directory / "bin" / "python")


def looks(code: str) -> str:
    """A program that prints JSON of the expression `code`."""
    return f"import json, os, sys; print(json.dumps({code}))"


def test_the_exit_code_is_the_engines() -> None:
    for code in (0, 1, 7, 113):
        assert ballast("run", "--", "sh", "-c", f"exit {code}").returncode == code


def test_it_is_replaced_by_the_engine() -> None:
    command = [sys.executable, "-m", "sidecar", "run", "--", "sh", "-c", "echo $$; read line"]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    process.communicate()


def test_the_engine_has_the_signals_of_a_new_program() -> None:
    done = ballast("run", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(done.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_everything_after_the_command_is_the_commands() -> None:
    for dashes in (["--"], []):
        done = ballast("run", *dashes, "echo", "--pool", "x", "--help", "--", "-p")
        assert done.stdout == "--pool x --help -- -p\n", done.stderr


def test_sets_what_it_was_told(tmp_path: Path) -> None:
    program = looks("{key: value for key, value in os.environ.items() if key.startswith('BALLAST_')}")

    def settings(*args: str, **env: str) -> dict[str, str]:
        found: dict[str, str] = json.loads(
            ballast("run", *args, "--", sys.executable, "-c", program, env=environment(**env)).stdout
        )
        return found

    assert settings() == {"BALLAST_POOL": "main", "BALLAST_MODE": "auto"}
    every = {
        "BALLAST_POOL": "p", "BALLAST_MODE": "require", "BALLAST_MODEL": "org/m", "BALLAST_WAIT": "1.5",
        "BALLAST_DIR": str(tmp_path),
    }  # fmt: skip
    args = ["-p", "p", "--mode", "require", "-m", "org/m", "--wait", "1.5", "--dir", str(tmp_path)]
    assert settings(*args) == every
    assert settings(**every) == every
    assert settings(*args, BALLAST_POOL="q", BALLAST_MODE="off", BALLAST_MODEL="n", BALLAST_WAIT="9") == every


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    done = ballast("run", "--", "no-such-engine")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "there is no command 'no-such-engine'" in done.stderr
    not_executable = tmp_path / "engine.py"
    not_executable.write_text("print()")
    done = ballast("run", "--", not_executable)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_the_shim_is_on_in_a_python_without_ballast(bare_python: str, tmp_path: Path) -> None:
    """And nothing but the shim: the sidecar's other packages are not to be seen there."""
    program = looks(
        "[[type(finder).__name__ for finder in sys.meta_path],"
        " __import__('engine_shim').__file__,"
        " [entry for entry in sys.path if 'site-packages' in entry],"
        " [name for name in ('sidecar', 'typer', 'torch') if __import__('importlib.util').util.find_spec(name)],"
        " 'torch' in sys.modules]"
    )
    environ = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    # Started in another directory than the project's, because "-c" puts that on the path.
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sidecar.cli import main; main()",
         "run", "--", bare_python, "-c", program],
        env=environ, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    finders, shim, site_packages, visible, torch = json.loads(done.stdout or "null") or pytest.fail(done.stderr)
    assert finders[0] == "HookingFinder"
    assert Path(shim).parent == ROOT / "engine_shim"
    assert all(entry.startswith(str(Path(bare_python).parent.parent)) for entry in site_packages)
    assert (visible, torch) == ([], False)


def test_the_folder_alone_does_nothing(bare_python: str) -> None:
    """Mounted into an image, its folder may be on PYTHONPATH always."""
    program = looks("['engine_shim' in sys.modules, [getattr(f, '__name__', type(f).__name__) for f in sys.meta_path]]")
    bare = subprocess.run([bare_python, "-c", program], env={}, capture_output=True, text=True, check=True)
    for more in ({}, {"BALLAST_POOL": ""}, {"BALLAST_POOL": "p", "BALLAST_MODE": "off"}):
        environ = {"PYTHONPATH": str(SITE), **more}
        done = subprocess.run([bare_python, "-c", program], env=environ, capture_output=True, text=True)
        assert (done.stdout, done.stderr) == (bare.stdout, "")


@pytest.mark.parametrize("pool", ["", "p"])
def test_another_sitecustomize_still_runs(bare_python: str, tmp_path: Path, pool: str) -> None:
    """Once, whatever it does, wherever it is, even if it hands on in the same way."""
    chaining = """
        import os, sys
        print("chaining", __name__)
        here = os.path.dirname(os.path.abspath(__file__))
        del sys.modules["sitecustomize"]
        path, sys.path[:] = sys.path[:], [entry for entry in sys.path if os.path.abspath(entry) != here]
        import sitecustomize
        sys.path[:] = path
    """
    plain = "print('plain', __name__, __file__ == sys.modules['sitecustomize'].__file__)"
    for name, text in (("chaining", chaining), ("plain", f"import sys\n{plain}"), ("broken", "1 / 0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(textwrap.dedent(text))

    def run(*folders: Path) -> subprocess.CompletedProcess[str]:
        environ = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "BALLAST_POOL": pool}
        program = "import sys; print(any(type(f).__name__ == 'HookingFinder' for f in sys.meta_path))"
        return subprocess.run([bare_python, "-c", program], env=environ, capture_output=True, text=True)

    on = str(bool(pool))
    plain_said = "plain sitecustomize True"
    assert run(SITE, tmp_path / "plain").stdout.splitlines() == [plain_said, on]
    assert run(SITE, SITE, tmp_path / "plain").stdout.splitlines() == [plain_said, on]
    assert run(tmp_path / "chaining", SITE, tmp_path / "plain").stdout.splitlines() == [
        "chaining sitecustomize", plain_said, on,
    ]  # fmt: skip
    assert run(SITE, tmp_path / "chaining", tmp_path / "plain").stdout.splitlines() == [
        "chaining sitecustomize", plain_said, on,
    ]  # fmt: skip
    broken, without = run(SITE, tmp_path / "broken"), run(tmp_path / "broken")
    assert broken.stdout.splitlines() == [on]
    assert broken.stderr == without.stderr and "ZeroDivisionError" in without.stderr


def test_an_installed_shim_has_precedence(bare_python: str, tmp_path: Path) -> None:
    installed = tmp_path / "engine_shim"
    (installed / "hooks").mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (installed / "hooks" / "__init__.py").write_text("")
    (installed / "hooks" / "bootstrap.py").write_text("def install(): print('the installed one')")
    environ = {"PYTHONPATH": f"{SITE}{os.pathsep}{tmp_path}", "BALLAST_POOL": "p"}
    done = subprocess.run([bare_python, "-c", ""], env=environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("the installed one\n", "")


def test_a_broken_shim_does_not_stop_the_program(bare_python: str, tmp_path: Path) -> None:
    broken = tmp_path / "engine_shim"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('no')")
    environ = {"PYTHONPATH": f"{SITE}{os.pathsep}{tmp_path}", "BALLAST_POOL": "p"}
    done = subprocess.run([bare_python, "-c", "print('started')"], env=environ, capture_output=True, text=True)
    assert done.stdout == "started\n"
    assert done.stderr == "ballast: the shim is not switched on: RuntimeError: no\n"


def test_an_unmodified_program_attaches(served: Sidecar, make: Make, pool_name: str, tmp_path: Path) -> None:
    program = "import sys; from safetensors.torch import load_file; t = load_file(sys.argv[1]); print(len(t)); input()"
    file = tmp_path / "m" / "model.safetensors"
    options = ["--pool", pool_name, "--mode", "require"]
    command = [sys.executable, "-m", "sidecar", "run", *options, "--", sys.executable, "-c", program, str(file)]
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "3\n"
        (attached,) = json.loads(ballast("status", "--json", "-p", pool_name).stdout)["pools"][0]["attachments"]
        assert (attached["pid"], attached["model"], attached["generation"]) == (process.pid, "m", 1)
        assert str(process.pid) in ballast("status", "-p", pool_name).stdout
    finally:
        process.communicate("\n")
    assert process.returncode == 0


def test_require_stops_the_program(make: Make, pool_name: str) -> None:
    program = "import sys; from safetensors.torch import load_file; load_file(sys.argv[1])"
    file = make("m") / "model.safetensors"
    began = time.monotonic()
    options = ["--pool", pool_name, "--mode", "require", "--wait", "0"]
    done = ballast("run", *options, "--", sys.executable, "-c", program, file)
    assert done.returncode == 1
    assert "BALLAST_MODE=require" in done.stderr
    assert time.monotonic() - began < 60
