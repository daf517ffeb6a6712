"""The images themselves, and single containers that are set up as they should not be."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_shim import __version__
from tests.containers.conftest import ROOT, listing, only_in_full, run, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

Start = Callable[..., str]


def inspect(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("docker", "inspect", name).stdout)[0]
    return found


def test_the_sidecars_image(images: dict[str, str]) -> None:
    """Small, without torch, not root, and it says what it is."""
    program = "import importlib.util as u, json; print(json.dumps([n for n in ('torch', 'numpy', 'pip') if u.find_spec(n)]))"
    image = images["sidecar"]
    found = json.loads(run("docker", "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", program).stdout)
    assert found == []
    sizes = [json.loads(run("docker", "inspect", name).stdout)[0]["Size"] for name in (image, "python:3.11-slim")]
    print(f"the sidecar's image is {(sizes[0] - sizes[1]) / 1e6:.0f} MB over its base")
    assert sizes[0] - sizes[1] < 150e6
    config = json.loads(run("docker", "inspect", image).stdout)[0]["Config"]
    assert config["User"] == "65532:65532" and config["Entrypoint"] == ["ballast"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"


def test_the_holders_image(images: dict[str, str]) -> None:
    """The same with the calls to the GPU's driver, whose absence it names."""
    image = images["sidecar-cuda"]
    program = "import importlib.util as u, cuda.bindings.driver; print([n for n in ('torch', 'numpy') if u.find_spec(n)])"
    assert run("docker", "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", program).stdout == "[]\n"
    found = inspect(image)
    assert found["Size"] - inspect("python:3.11-slim")["Size"] < 150e6
    assert found["Config"]["User"] == "65532:65532" and found["Config"]["Entrypoint"] == ["ballast"]
    assert found["Config"]["Labels"]["org.opencontainers.image.title"] == "ballast-sidecar-cuda"
    hardened = ["--rm", "--network=none", "--read-only", "--cap-drop=ALL"]
    done = run("docker", "run", *hardened, image, "hold", "--no-wait", check=False)
    assert done.returncode == 1 and "libcuda.so.1 is not there" in done.stderr and "--gpus" in done.stderr


@only_in_full
def test_two_builds_give_the_same_files(images: dict[str, str], pip_arguments: list[str]) -> None:
    """Nothing is taken from the cache for the second one. (test_podman.py has it with another builder, always.)"""
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}
    again = "ballast-sidecar-again"
    run(
        "docker", "build", "--no-cache", "--network=host", *pip_arguments, "--target", "sidecar", "-t", again,
        "-f", "Containerfile", ".", timeout=600, cwd=ROOT, env=environ,
    )  # fmt: skip
    try:
        assert set(listing("docker", images["sidecar"])) ^ set(listing("docker", again)) == set()
    finally:
        run("docker", "rmi", again)


def test_the_shim_goes_into_any_image(images: dict[str, str], pip_arguments: list[str], tmp_path: Path) -> None:
    """The engine target: everything of the given image stays, a PYTHONPATH of its own too."""
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}
    (tmp_path / "Containerfile").write_text(
        "FROM python:3.11-slim\nENV PYTHONPATH=/own\nUSER 1234\n"
        'RUN ["true"]\nENTRYPOINT ["python3"]\n'
    )
    run("docker", "build", "-t", "ballast-test-own", "-f", str(tmp_path / "Containerfile"), str(tmp_path), env=environ)
    tags = []
    try:
        for base, python_path in (("ballast-test-own", "/ballast:/own"), ("python:3.11-slim", "/ballast")):
            tags.append(f"ballast-test-{len(tags)}")
            run(
                "docker", "build", "--network=host", *pip_arguments, "--target=engine", f"--build-arg=ENGINE_IMAGE={base}",
                "-t", tags[-1], "-f", "Containerfile", ".", timeout=600, cwd=ROOT, env=environ,
            )  # fmt: skip
            program = "import json, os, sys; seen = [os.environ['PYTHONPATH'], os.getuid(), type(sys.meta_path[0]).__name__];"
            program += "print(json.dumps(seen))"
            environment = ["--rm", "--network=none", "--read-only", "--env=BALLAST_POOL=main", "--entrypoint=python3"]
            found = json.loads(run("docker", "run", *environment, tags[-1], "-c", program).stdout)
            assert found == [python_path, 1234 if base == "ballast-test-own" else 0, "HookingFinder"]
            config = json.loads(run("docker", "inspect", tags[-1]).stdout)[0]["Config"]
            assert not [entry for entry in config["Env"] if entry.startswith("BALLAST")]
            assert config["Entrypoint"] == (["python3"] if base == "ballast-test-own" else None)
    finally:
        run("docker", "rmi", *tags, "ballast-test-own", check=False)


def test_injected_through_a_volume(images: dict[str, str]) -> None:
    """An engine's image as it is, with another user than root, a read-only root and a read-only volume."""
    volume = f"t-{os.getpid()}-shim"
    try:
        hardened = ["--rm", "--network=none", "--user=0:0", "--read-only", "--cap-drop=ALL", "-v", f"{volume}:/ballast"]
        assert "now has the shim" in run("docker", "run", *hardened, images["sidecar"], "inject", "/ballast").stdout
        engine = ["--rm", "--network=none", "--read-only", "--user=65532:65532", "-v", f"{volume}:/ballast:ro"]
        environ = ["--env=PYTHONPATH=/ballast", "--env=BALLAST_POOL=main", "--entrypoint=python3"]
        program = "import sys; print(type(sys.meta_path[0]).__name__)"
        assert run("docker", "run", *engine, *environ, "python:3.11-slim", "-c", program).stdout == "HookingFinder\n"
        done = run("docker", "run", *engine, *environ, "python:3.11-slim", "-m", "engine_shim", "doctor", check=False)
        assert done.returncode == 1 and "the shim is on" in done.stdout and "private IPC" in done.stdout
        assert "already had" in run("docker", "run", *engine, images["sidecar"], "inject", "/ballast").stdout
    finally:
        run("docker", "volume", "rm", volume, check=False)


def test_a_dev_shm_of_64_megabytes(images: dict[str, str], containers: Start) -> None:
    """What docker gives by default: refused before anything is filled, with the name of what to set."""
    volume = f"t-{os.getpid()}-model"
    try:
        run("docker", "run", "--rm", "--network=none", "-v", f"{volume}:/models:ro", images["demo-model"])
        options = ["--read-only", "--cap-drop=ALL", "-v", f"{volume}:/models:ro"]
        name = containers(*options, images["sidecar"], "serve", "/models/smollm2")
        until("it does not end", lambda: inspect(name)["State"]["Status"] == "exited")
        assert inspect(name)["State"]["ExitCode"] == 1
        said = run("docker", "logs", name).stderr
        assert "MiB are free in /dev/shm" in said and "shm_size" in said
    finally:
        run("docker", "rm", "--force", "--volumes", name, check=False)
        run("docker", "volume", "rm", volume, check=False)


def test_split_brain(images: dict[str, str], containers: Start) -> None:
    """The sidecar owns the IPC namespace and is restarted: the doctor in the engine's container names it.

    Once with the engine in a PID namespace of its own, from where it can only be surmised, and once where it is seen.
    """
    volume = f"t-{os.getpid()}-split"
    names: list[str] = []
    try:
        run("docker", "run", "--rm", "--network=none", "-v", f"{volume}:/models:ro", images["demo-model"])
        sidecar = containers(
            "--ipc=shareable", "--shm-size=1g", "--restart=always", "-v", f"{volume}:/models:ro", "--pid=host",
            images["sidecar"], "serve", "/models/smollm2",
        )  # fmt: skip
        names.append(sidecar)
        run("docker", "exec", sidecar, "ballast", "wait")
        engines = [
            containers(
                "--interactive", f"--ipc=container:{sidecar}", *more, "--env=BALLAST_POOL=main", "--entrypoint=python3",
                images["demo-engine"], "-c", "input()",
            )
            for more in ([], ["--pid=host"])
        ]  # fmt: skip
        names += engines

        def ask(engine: str) -> tuple[int, dict[str, str]]:
            done = run("docker", "exec", engine, "python3", "-m", "engine_shim", "doctor", "--json", check=False)
            (row,) = [row for row in json.loads(done.stdout)["findings"] if row["check"] == "sidecar"]
            return done.returncode, row

        for engine in engines:
            code, row = ask(engine)
            assert (code, row["verdict"]) == (0, "ok")
        os.kill(inspect(sidecar)["State"]["Pid"], 9)
        until("not restarted", lambda: inspect(sidecar)["RestartCount"] == 1)
        until("not ready", lambda: run("docker", "logs", sidecar).stderr.count("is ready: generation") == 2)
        says_each = ("this is a split brain: it owned the IPC namespace", "split brain: pool 'main' in this")
        for engine, says in zip(engines, says_each, strict=True):
            code, row = ask(engine)
            assert (code, row["verdict"]) == (1, "fault")
            assert says in row["text"] and "never restarts" in row["remedy"]
    finally:
        for name in reversed(names):
            run("docker", "rm", "--force", "--volumes", name, check=False)
        run("docker", "volume", "rm", volume, check=False)
