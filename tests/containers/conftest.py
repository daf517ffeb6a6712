"""Real containers: images that are built once, and stacks that are gone at the end of their tests, whatever happened in them.

Where no container engine is, these tests are skipped and say how to start one. They build from the tree as it is.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2"
QUESTION = "What is the capital of France?"
PATIENCE = 600.0  # seconds for anything that a busy machine of two cores does in twenty

START_DOCKER = "no Docker daemon answers: start one (with the compose plugin), or set DOCKER_HOST"
START_PODMAN = "podman is missing: apt install podman"

# What takes a minute more and tells the least beside the others.
only_in_full = pytest.mark.skipif(
    not os.environ.get("BALLAST_TEST_CONTAINERS_FULL"), reason="takes long: set BALLAST_TEST_CONTAINERS_FULL=1"
)


def run(*command: str, timeout: float = PATIENCE, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, **more)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done


def until(what: str, look: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Waits until `look` gives something, and returns it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = look()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"after {timeout:.0f} s: {what}")


@pytest.fixture(scope="session")
def docker() -> str:
    if shutil.which("docker") is None or run("docker", "info", check=False, timeout=30).returncode:
        pytest.skip(START_DOCKER)
    return "docker"


class _Server(http.server.ThreadingHTTPServer):
    allow_reuse_port = True  # two runs at once serve the same folder: a build's cache knows its arguments, and so the port


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def pip_arguments() -> Iterator[list[str]]:
    """Build arguments by which pip in a build finds what pip finds here. A folder of wheels is served: builds see no folder."""
    arguments = [
        f"--build-arg={name}={os.environ[name]}" for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if name in os.environ
    ]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if not os.path.isdir(wheels):
        yield [*arguments, *([f"--build-arg=PIP_FIND_LINKS={wheels}"] if wheels else [])]
        return
    handler = functools.partial(_Quiet, directory=wheels)
    server = _Server(("127.0.0.1", 8899), handler)  # the same every time, so that layers of an earlier run are found again
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [*arguments, f"--build-arg=PIP_FIND_LINKS=http://127.0.0.1:{server.server_address[1]}/"]
    server.shutdown()


IMAGES = {
    "sidecar": "ballast-sidecar",
    "sidecar-cuda": "ballast-sidecar-cuda",
    "demo-model": "ballast-demo-model",
    "demo-engine": "ballast-demo-engine",
}


@pytest.fixture(scope="session")
def images(docker: str, pip_arguments: list[str]) -> dict[str, str]:
    """Target of the Containerfile -> image."""
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}  # the builder that every Docker has
    for target, tag in IMAGES.items():
        run(
            docker, "build", "--network=host", *pip_arguments, "--target", target, "-t", tag, "-f", "Containerfile", ".",
            timeout=900, cwd=ROOT, env=environ,
        )  # fmt: skip
    return IMAGES


def listing(engine: str, image: str) -> list[str]:
    """The files of an image of ours, by docker or podman."""
    lines = run(engine, "run", "--rm", "--network=none", "--entrypoint=python3", image, "-c", LISTING).stdout.splitlines()
    assert len(lines) > 500
    return lines


@dataclass
class Stack:
    """A project of compose.yaml, or of another file. `environ` fills in its variables."""

    name: str
    environ: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = (str(ROOT / "compose.yaml"),)

    def compose(self, *command: str, check: bool = True, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        files = [part for file in self.files for part in ("-f", file)]
        environ = {**os.environ, "BALLAST_NETWORK": "none", **self.environ}
        return run(
            "docker", "compose", "-p", self.name, *files, *command, check=check, timeout=timeout, cwd=ROOT, env=environ
        )

    def container(self, service: str, index: int = 1) -> str:
        return f"{self.name}-{service}-{index}"

    def inspect(self, service: str, index: int = 1) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("docker", "inspect", self.container(service, index)).stdout)[0]
        return found

    def log(self, service: str, index: int = 1) -> str:
        done = run("docker", "logs", self.container(service, index))
        return done.stdout + done.stderr

    def python(self, service: str, program: str, *args: str, index: int = 1, **environ: str) -> str:
        """What a Python program prints in a running container."""
        options = [f"--env={key}={value}" for key, value in environ.items()]
        return run("docker", "exec", *options, self.container(service, index), "python3", "-c", program, *args).stdout

    def ask(self, index: int = 1, service: str = "engine") -> dict[str, Any]:
        """The engine's answer to the question."""
        answer: dict[str, Any] = json.loads(self.python(service, ASK, QUESTION, index=index))["choices"][0]
        return answer

    def kill(self, service: str) -> None:
        """kill -9 from outside, as the kernel does: `docker kill` would count as an order, and nothing would start again."""
        os.kill(self.inspect(service)["State"]["Pid"], 9)

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "1", "--remove-orphans")


# All that the build has put into an image of ours: what each file holds, its mode, its name.
LISTING = """
import hashlib, os
for folder, _, names in sorted(os.walk("/opt/ballast")):
    for name in sorted(names):
        path = os.path.join(folder, name)
        data = os.readlink(path).encode() if os.path.islink(path) else open(path, "rb").read()
        print(hashlib.sha256(data).hexdigest(), oct(os.lstat(path).st_mode), path)
"""

ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": sys.argv[1], "max_tokens": 24}).encode()
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=200).read().decode())
"""


@pytest.fixture(scope="module")
def stack(images: dict[str, str]) -> Iterator[Stack]:
    """The demo of compose.yaml, up and answering, with two engines."""
    one = Stack(f"t-{secrets.token_hex(3)}")
    try:
        one.compose("up", "--detach", "--wait", "--no-build", "--scale", "engine=2", timeout=900)
        yield one
    except BaseException:
        print(one.compose("logs", "--no-color", check=False).stdout, file=sys.stderr)
        raise
    finally:
        one.down()


@pytest.fixture
def containers(docker: str) -> Iterator[Callable[..., str]]:
    """Starts single containers, by `docker run` with these arguments, that are removed at the end; returns their names."""
    names: list[str] = []

    def start(*arguments: str, name: str = "") -> str:
        names.append(name or f"t-{secrets.token_hex(4)}")
        run(docker, "run", "--detach", "--name", names[-1], "--network=none", *arguments)
        return names[-1]

    yield start
    for name in reversed(names):
        run(docker, "rm", "--force", "--volumes", name, check=False)
