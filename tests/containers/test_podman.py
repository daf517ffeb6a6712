"""The same pod under podman: by `podman kube play` from the Kubernetes overlay, and by hand."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.conftest import (
    ASK,
    PATIENCE,
    QUESTION,
    ROOT,
    START_PODMAN,
    Stack,
    listing,
    only_in_full,
    run,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

TAG = "0.1.0"  # that of the manifests
IMAGES = ("ballast-sidecar", "ballast-demo-model", "ballast-demo-engine")

# For a machine without systemd, and with lower limits than podman's defaults.
CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
compat_api_enforce_docker_hub = false
"""


@pytest.fixture(scope="module")
def podman(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """podman with the images that docker has built: they are the same files, and building them twice takes minutes."""
    if shutil.which("podman") is None:
        pytest.skip(START_PODMAN)
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a tmpfs for the pod: run the tests as root")
    conf = tmp_path_factory.mktemp("podman") / "containers.conf"
    # Where cgroups are half of version 1 and half of version 2, podman's own choice, crun, runs nothing.
    conf.write_text(CONF + 'runtime = "runc"\n' if shutil.which("runc") else CONF)
    previous = os.environ.get("CONTAINERS_CONF")
    os.environ["CONTAINERS_CONF"] = str(conf)
    try:
        save = subprocess.Popen(["docker", "save", *IMAGES], stdout=subprocess.PIPE)
        subprocess.run(["podman", "load", "--quiet"], stdin=save.stdout, check=True, capture_output=True, timeout=600)
        assert save.wait() == 0
        for image in IMAGES:
            run("podman", "tag", f"localhost/{image}:latest", f"localhost/{image}:{TAG}")
        yield "podman"
    finally:
        if previous is None:
            del os.environ["CONTAINERS_CONF"]
        else:
            os.environ["CONTAINERS_CONF"] = previous


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs for a pod, as the documentation has it made."""
    folder = tmp_path / "shm"
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1g,mode=1777", "tmpfs", str(folder))
    yield folder
    run("umount", "-l", str(folder))


def log(container: str) -> str:
    done = run("podman", "logs", container)
    return done.stdout + done.stderr


def answer(container: str) -> str:
    done = run("podman", "exec", container, "python3", "-c", ASK, QUESTION)
    text: str = json.loads(done.stdout)["choices"][0]["text"]
    return text


def test_the_pod_of_the_kubernetes_overlay(podman: str, memory: Path, tmp_path: Path) -> None:
    """Answers from memory; after kill -9 the sidecar is started again and takes over; so is the engine, and attaches."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is missing: install it (the client alone; no cluster is needed)")
    rendered = run("kubectl", "kustomize", str(ROOT / "deploy" / "kubernetes" / "overlays" / "cpu")).stdout
    script = [sys.executable, str(ROOT / "deploy" / "podman" / "kube.py"), "--no-ports", str(memory)]
    made = subprocess.run(script, input=rendered, capture_output=True, text=True, check=True)
    pod = tmp_path / "pod.yaml"
    pod.write_text(made.stdout)
    try:
        run(podman, "kube", "play", "--network=none", str(pod))
        until("no answer", lambda: "ready on port" in log("engine-engine"))
        assert "model comes from memory: generation 1 of pool main" in log("engine-engine")
        assert "Paris" in answer("engine-engine")
        state = json.loads(run(podman, "inspect", "engine-sidecar").stdout)[0]
        assert state["HostConfig"]["ReadonlyRootfs"] and not state["EffectiveCaps"]

        for container, sign in (("engine-sidecar", "adopted model, generation 1"), ("engine-engine", "ready on port")):
            count = log(container).count(sign)
            os.kill(json.loads(run(podman, "inspect", container).stdout)[0]["State"]["Pid"], 9)
            until(f"{container} was not restarted", lambda c=container, s=sign, n=count: log(c).count(s) > n)
        assert log("engine-sidecar").count("is ready: generation") == 1
        assert log("engine-engine").count("comes from memory") == 2
        assert "Paris" in answer("engine-engine")
    finally:
        run(podman, "kube", "down", str(pod), check=False)
        run(podman, "pod", "rm", "--force", "engine", check=False)


def test_a_pod_by_hand(podman: str) -> None:
    """As docs/podman.md has it."""
    name = f"t-{secrets.token_hex(3)}"
    common = ["--pod", name, "--user=65532:65532", "--read-only", "--cap-drop=ALL", "-v", f"{name}:/models:ro"]
    common.append("--restart=on-failure")
    try:
        run(podman, "run", "--rm", "--network=none", "-v", f"{name}:/models", "ballast-demo-model")
        run(podman, "pod", "create", "--name", name, "--network=none", "--shm-size=1g")
        run(podman, "run", "--detach", "--name", f"{name}-sidecar", *common, "ballast-sidecar", "serve", "/models/smollm2")
        run(podman, "exec", f"{name}-sidecar", "ballast", "wait", "--timeout", "200", timeout=PATIENCE)
        run(
            podman, "run", "--detach", "--name", f"{name}-engine", *common, "--tmpfs=/tmp", "--env=BALLAST_POOL=main",
            "ballast-demo-engine", "/models/smollm2",
        )  # fmt: skip
        until("no answer", lambda: "ready on port" in log(f"{name}-engine"))
        assert "smollm2 comes from memory" in log(f"{name}-engine") and "Paris" in answer(f"{name}-engine")
        done = run(podman, "exec", f"{name}-engine", "python3", "-m", "engine_shim", "doctor")
        assert "the sidecar of pool 'main' lives" in done.stdout
        for part, sign in (("sidecar", "adopted smollm2, generation 1"), ("engine", "ready on port")):
            count = log(f"{name}-{part}").count(sign)
            os.kill(json.loads(run(podman, "inspect", f"{name}-{part}").stdout)[0]["State"]["Pid"], 9)
            until(f"{part} was not restarted", lambda p=part, s=sign, n=count: log(f"{name}-{p}").count(s) > n)
        assert log(f"{name}-engine").count("smollm2 comes from memory") == 2 and "Paris" in answer(f"{name}-engine")
    finally:
        run(podman, "pod", "rm", "--force", name, check=False)
        run(podman, "volume", "rm", "--force", name, check=False)


def test_compose_on_podmans_socket(podman: str, tmp_path: Path) -> None:
    """compose.yaml as it is, as docs/podman.md has it: in two steps, since nothing runs health checks here."""
    address = f"unix://{tmp_path}/podman.sock"
    stack = Stack(f"t-{secrets.token_hex(3)}", {"DOCKER_HOST": address})
    sidecar, engine = stack.container("sidecar"), stack.container("engine")
    with subprocess.Popen([podman, "system", "service", "--time=0", address]) as service:
        try:
            until("podman does not serve", (tmp_path / "podman.sock").exists)
            stack.compose("up", "--no-build", "--detach", "shm", "model", "sidecar")
            stack.compose("exec", "-T", "sidecar", "ballast", "wait", "--timeout", "200")
            stack.compose("up", "--no-build", "--detach", "--no-deps", "engine")
            until("no answer", lambda: "ready on port" in log(engine))
            assert "smollm2 comes from memory" in log(engine) and "Paris" in answer(engine)
            os.kill(json.loads(run(podman, "inspect", sidecar).stdout)[0]["State"]["Pid"], 9)
            until("the sidecar was not restarted", lambda: "adopted smollm2, generation 1" in log(sidecar))
            assert "Paris" in answer(engine)
        finally:
            stack.down()
            service.terminate()


def _take(image: str) -> None:
    """What docker has, into podman: no registry is asked."""
    save = subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE)
    subprocess.run(["podman", "load", "--quiet"], stdin=save.stdout, check=True, capture_output=True, timeout=300)
    assert save.wait() == 0


def _build(podman: str, target: str, image: str, *options: str) -> None:
    run(
        podman, "build", "--network=host", "--pull=never", "--layers=false", *options, "--target", target, "-t", image,
        "-f", "Containerfile", ".", timeout=600, cwd=ROOT,
    )  # fmt: skip


def test_podman_builds_the_same_files(podman: str, images: dict[str, str], pip_arguments: list[str]) -> None:
    """Another builder, nothing from a cache: so the build depends on nothing but the tree and the base."""
    _take("python:3.11-slim")
    image = f"ballast-test-{secrets.token_hex(3)}"
    try:
        _build(podman, "sidecar", image, *pip_arguments)
        assert set(listing(podman, image)) ^ set(listing("docker", images["sidecar"])) == set()
        config = json.loads(run(podman, "inspect", image).stdout)[0]["Config"]
        assert config["User"] == "65532:65532" and config["Entrypoint"] == ["ballast"] and config["StopSignal"] == "SIGTERM"
    finally:
        run(podman, "rmi", "--force", image, check=False)


@only_in_full
def test_podman_builds_an_engine(podman: str, pip_arguments: list[str]) -> None:
    _take("python:3.11-slim")
    image = f"ballast-test-{secrets.token_hex(3)}"
    try:
        _build(podman, "engine", image, *pip_arguments)
        command = ["--entrypoint=python3", image, "-c", "import os; print(os.environ['PYTHONPATH'])"]
        assert run(podman, "run", "--rm", "--network=none", *command).stdout == "/ballast\n"
    finally:
        run(podman, "rmi", "--force", image, check=False)
