"""compose.yaml's profile `vllm`: a real vLLM whose image knows nothing of Ballast, with the shim out of a volume.

Takes minutes, and needs an environment with vLLM's build for CPUs on this machine: it stands for what is in vLLM's own image.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import MODEL, ROOT, Stack, only_in_full, run, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500, func_only=True), only_in_full]

MISSING = "no vLLM: 'make test-vllm' installs one; set BALLAST_TEST_VLLM_PYTHON=.venv-vllm/bin/python"
IMAGE = "ballast-test-vllm"
BASE = "python:3.11-slim"
# As vLLM's image starts it. Its libraries are mounted: an image of them would be 3 GB.
CONTAINERFILE = f"""
FROM {BASE}
RUN ["python3", "-m", "venv", "--without-pip", "/opt/vllm"]
COPY libnuma.so.1 /usr/lib/
ENTRYPOINT ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"]
"""
LOOK = """
import ctypes, json, sys, sysconfig, vllm
ctypes.CDLL("libnuma.so.1")
numa = [line.split()[-1] for line in open("/proc/self/maps") if "libnuma" in line][0]
print(json.dumps([list(sys.version_info[:2]), sysconfig.get_path("purelib"), numa]))
"""
# Greedily; what it answers, bit by bit.
ASK = """
import json, urllib.request
asked = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "logprobs": 3, "return_token_ids": True}
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
)
answer = json.loads(urllib.request.urlopen(request, timeout=200).read())["choices"][0]
print(json.dumps([answer["text"], answer["token_ids"], answer["logprobs"]["top_logprobs"]]))
"""
ATTACHED = f"ballast: {MODEL} comes from memory as it was after loading"


@pytest.fixture(scope="module")
def site(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Builds the image; where vLLM is on this machine."""
    python = os.environ.get("BALLAST_TEST_VLLM_PYTHON", "")
    if not python or shutil.which(python) is None:
        pytest.skip(MISSING)
    version, purelib, numa = json.loads(run(python, "-c", LOOK).stdout.splitlines()[-1])
    program = "import sys; print(list(sys.version_info[:2]))"
    inside = json.loads(run(docker, "run", "--rm", "--network=none", BASE, "python3", "-c", program).stdout)
    if inside != version:
        pytest.skip(f"{python} is Python {version}, and {BASE} has {inside}: make test-vllm PYTHON=python3.11")
    context: Path = tmp_path_factory.mktemp("vllm")
    shutil.copyfile(numa, context / "libnuma.so.1")
    (context / "Containerfile").write_text(CONTAINERFILE)
    environ = {**os.environ, "DOCKER_BUILDKIT": "0"}
    run(docker, "build", "--network=none", "-t", IMAGE, "-f", str(context / "Containerfile"), str(context), env=environ)
    yield purelib
    run(docker, "rmi", IMAGE, check=False)


def test_it_attaches_after_every_restart(images: dict[str, str], site: str) -> None:
    """The first start publishes; after `restart` and kill -9 of engine and sidecar it attaches, and answers the same."""
    files = (str(ROOT / "compose.yaml"), str(Path(__file__).with_name("vllm.yaml")))
    stack = Stack(f"t-{secrets.token_hex(3)}", {"VLLM_IMAGE": IMAGE, "VLLM_SITE": site}, files)

    def ask() -> list[object]:
        answer: list[object] = json.loads(stack.python("vllm", ASK))
        return answer

    def attached(times: int) -> None:
        until(f"it did not attach for the {times}. time", lambda: stack.log("vllm").count(ATTACHED) == times)
        until("it is not healthy", lambda: stack.inspect("vllm")["State"]["Health"]["Status"] == "healthy")

    def holders() -> int:
        done = run("docker", "exec", stack.container("sidecar"), "ballast", "status", "--json")
        return len(json.loads(done.stdout)["pools"][0]["attachments"])

    try:
        stack.compose("--profile", "vllm", "up", "--detach", "--wait", "--no-build", "vllm")
        log = stack.log("vllm")
        assert f"ballast: {MODEL} comes from memory: generation 1 of pool main" in log and ATTACHED not in log
        assert f"ballast: published the state of {MODEL} to pool main" in log
        first = ask()
        assert "Paris" in str(first[0])

        stack.compose("--profile", "vllm", "restart", "vllm")
        attached(1)
        assert ask() == first

        stack.kill("vllm")
        attached(2)
        assert ask() == first
        until("processes of a killed engine live on", lambda: holders() == 1, timeout=30)

        stack.kill("sidecar")
        until("the sidecar does not adopt", lambda: stack.log("sidecar").count(f"adopted {MODEL}, generation 1") == 1)
        assert ask() == first
        stack.kill("vllm")
        attached(3)
        assert ask() == first
        assert stack.log("sidecar").count("is ready: generation") == 1  # read from disk once in all this
        assert stack.log("vllm").count("published the state") == 1
    except BaseException:
        print(stack.compose("--profile", "vllm", "logs", "--no-color", "--tail=200", check=False).stdout)
        raise
    finally:
        stack.down()
