"""What holds for every command: exit codes, one sentence on stderr, help that teaches, quick starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_shim import __version__
from tests.cli.conftest import Make
from tests.conftest import left_behind
from tests.processes import Sidecar, ballast, environment

COMMANDS = ("serve", "run", "wait", "status", "manifest", "verify", "purge", "demo")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["frobnicate"], "no such command 'frobnicate'"),
        (["serve"], "missing argument 'CHECKPOINT'"),
        (["serve", "x", "--on-exit", "maybe"], "'maybe' is not one of 'keep', 'remove'"),
        (["run"], "missing argument 'COMMAND'"),
        (["run", "--mode", "never", "true"], "--mode"),
        (["wait", "m", "--timeout", "soon"], "--timeout"),
        (["manifest"], "missing argument 'NAME'"),
        (["status", "--jsn"], "no such option: --jsn"),
        (["status", "--pool", "no.dots"], "'no.dots' cannot name a pool"),
        (["serve", "x", "--pool", "../x"], "'../x' cannot name a pool"),
        (["serve", "x", "--name", "a b"], "'a b' cannot name a model"),
        (["serve", "x", "--name", "a\x1b[31m"], r"'a\x1b[31m' cannot name a model"),
        (["serve", "x", "y", "--name", "a"], "1 --name for 2 checkpoints"),
        (["serve", "x/m", "y/m"], "would both be called 'm'"),
        (["serve", "x", "y", "--name", "a", "--name", "a"], "would both be called 'a'"),
    ],
)
def test_bad_usage_is_one_sentence_and_code_2(args: list[str], says: str) -> None:
    done = ballast(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ballast: ") and done.stderr.count("\n") == 1
    assert says in done.stderr.replace("\\\\", "\\")


def test_a_wrong_mode_in_the_environment_is_bad_usage() -> None:
    done = ballast("run", "true", env=environment(BALLAST_MODE="sometimes"))
    assert done.returncode == 2
    assert "'sometimes' is not one of" in done.stderr


def test_nothing_asked_shows_the_help() -> None:
    done = ballast()
    assert done.returncode == 2
    assert "Usage: ballast" in done.stdout


def test_version() -> None:
    done = ballast("--version")
    assert (done.returncode, done.stdout) == (0, f"ballast {__version__}\n")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_lists_and_teaches(command: str | None) -> None:
    done = ballast(*([command] if command else []), "--help", env=environment(COLUMNS="120"))
    assert done.returncode == 0
    if command is None:
        assert all(name in done.stdout for name in COMMANDS)
        assert "Exit codes" in done.stdout
    elif command != "demo":
        assert f"ballast {command}" in done.stdout.split("Options")[-1]  # an example below the options


def test_help_is_quick_and_needs_little() -> None:
    code = "import sys, sidecar.cli; print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'tenacity', 'xxhash'}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    script = subprocess.run(
        [sys.executable, "-m", "sidecar"],
        env=environment(_BALLAST_COMPLETE=f"source_{shell}"),
        capture_output=True,
        text=True,
    )
    assert "_BALLAST_COMPLETE" in script.stdout, script.stderr


def test_completes_commands_and_models(served: Sidecar, pool_name: str) -> None:
    def complete(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        environ = environment(_BALLAST_COMPLETE="complete_bash", **words)
        return ballast(env=environ).stdout.split()

    assert "serve" in complete("ballast se")
    assert complete(f"ballast wait --pool {pool_name} ") == ["m"]
    assert pool_name in complete("ballast wait --pool t-")


def test_not_found_is_code_3(pool_name: str) -> None:
    for args in (["status"], ["manifest", "m"], ["verify"], ["wait", "--timeout", "0"], ["purge"]):
        done = ballast(*args, env=environment(pool_name))
        assert done.returncode == 3, args
        assert done.stderr.startswith("ballast: ") and done.stderr.count("\n") == 1, args
    assert left_behind(pool_name) == []


def test_pool_and_dir_come_from_the_environment(make: Make, tmp_path: Path, pool_name: str) -> None:
    directory = tmp_path / "memory"
    directory.mkdir()
    with Sidecar(pool_name, make("m"), directory=directory) as sidecar:
        sidecar.ready("m")
        done = ballast("wait", "m", env=environment(pool_name, BALLAST_DIR=str(directory)))
        assert done.returncode == 0, done.stderr
        assert ballast("wait", "m", "-t", "0", env=environment(pool_name)).returncode == 3
        assert sidecar.interrupt() == 0
    assert os.listdir(directory) == []


def test_the_whole_story_only_on_request(pool_name: str) -> None:
    assert "Traceback" not in ballast("status", "-p", pool_name).stderr
    done = ballast("status", "-p", pool_name, env=environment(BALLAST_LOG="debug"))
    assert done.returncode == 3
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ballast: there is no pool")


def test_an_unknown_log_level_is_said(pool_name: str) -> None:
    done = ballast("status", "-p", pool_name, env=environment(BALLAST_LOG="loud"))
    assert "BALLAST_LOG=LOUD is none of DEBUG, INFO" in done.stderr


def test_a_reader_that_has_had_enough(served: Sidecar, pool_name: str) -> None:
    read, write = os.pipe()
    os.close(read)
    for args in (["manifest", "m"], ["status", "--json"], ["--help"]):
        command = [sys.executable, "-m", "sidecar", *args]
        done = subprocess.run(command, env=environment(pool_name), stdout=write, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, ""), args
    os.close(write)
