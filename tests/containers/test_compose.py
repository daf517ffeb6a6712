"""compose.yaml, up for real: an engine that answers from memory, and everything that can happen to it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.containers.conftest import ASK, MODEL, QUESTION, Stack, run, until
from tests.device.emulated import A, build

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900, func_only=True)]

# In the engine's container: every tensor by the shim, which has to attach, against the same file read as plain bytes.
COMPARE = """
import glob, json, torch
from safetensors import safe_open
from safetensors.torch import load
count = size = 0
for path in sorted(glob.glob("/models/*/*.safetensors")):
    plain = load(open(path, "rb").read())
    with safe_open(path, "pt") as shared:
        assert "/ballast-main.g" in open("/proc/self/maps").read()
        assert sorted(shared.keys()) == sorted(plain)
        for name, tensor in plain.items():
            other = shared.get_tensor(name)
            assert other.dtype == tensor.dtype and other.shape == tensor.shape, name
            assert torch.equal(other.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
            count, size = count + 1, size + tensor.nbytes
print(json.dumps([count, size]))
"""


def test_it_answers_from_memory(stack: Stack) -> None:
    answers = [stack.ask(index) for index in (1, 2)]
    assert "Paris" in answers[0]["text"]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    for index in (1, 2):
        assert f"{MODEL} comes from memory: generation 1 of pool main" in stack.log("engine", index)
    (pool,) = json.loads(run("docker", "exec", stack.container("sidecar"), "ballast", "status", "--json").stdout)["pools"]
    assert len(pool["attachments"]) == 2


def test_the_tokens_are_those_of_an_engine_without_it(stack: Stack) -> None:
    name = stack.container("engine")
    environ = ["--env=BALLAST_POOL=", "--volumes-from", f"{name}:ro", "--network=none", "--read-only", "--tmpfs=/tmp"]
    plain = run("docker", "run", "--detach", "--rm", *environ, "ballast-demo-engine", "/models/smollm2").stdout.strip()
    try:
        until("no answer without Ballast", lambda: "ready" in run("docker", "logs", plain).stdout)
        answer = json.loads(run("docker", "exec", plain, "python3", "-c", ASK, QUESTION).stdout)["choices"][0]
        assert "comes from memory" not in run("docker", "logs", plain).stderr
        assert answer["tokens"] == stack.ask()["tokens"]
    finally:
        run("docker", "rm", "--force", plain, check=False)


def test_every_bit_is_the_files(stack: Stack) -> None:
    count, size = json.loads(stack.python("engine", COMPARE, BALLAST_MODE="require"))
    assert count == 272 and size > 250 << 20


def test_nothing_of_it_can_do_more_than_it_must(stack: Stack) -> None:
    for service in ("shm", "sidecar", "engine"):
        state = stack.inspect(service)
        assert state["HostConfig"]["ReadonlyRootfs"] and state["HostConfig"]["CapDrop"] == ["ALL"]
        assert state["Config"]["User"] == "65532:65532" and not state["HostConfig"]["Privileged"]
        assert state["HostConfig"]["SecurityOpt"] == ["no-new-privileges:true"]
        written = run("docker", "exec", stack.container(service), "touch", "/opt/x", check=False)
        assert written.returncode and "Read-only file system" in written.stderr
    assert stack.inspect("sidecar")["HostConfig"]["NetworkMode"] == "none"
    interfaces = stack.python("sidecar", "import os; print(sorted(os.listdir('/sys/class/net')))")
    assert interfaces == "['lo']\n"
    written = run("docker", "exec", stack.container("sidecar"), "touch", "/models/x", check=False)
    assert written.returncode and "Read-only file system" in written.stderr


def test_the_doctor_finds_nothing_to_mend(stack: Stack) -> None:
    done = run("docker", "exec", stack.container("engine"), "python3", "-m", "engine_shim", "doctor")
    assert "the shim is on in this Python" in done.stdout and "read-only, which Ballast does not mind" in done.stdout
    done = run("docker", "exec", stack.container("sidecar"), "ballast", "doctor", "--json")
    assert json.loads(done.stdout)["faults"] == 0


def test_the_sidecar_pays_for_the_weights(stack: Stack) -> None:
    """By the kernel's account: its container has them, the engines' have not."""
    weights = 250 << 20

    def shared(service: str) -> int:
        identifier = stack.inspect(service)["Id"]
        for root in ("/sys/fs/cgroup/memory/docker", "/sys/fs/cgroup/docker"):
            path = f"{root}/{identifier}/memory.stat"
            if os.path.exists(path):
                rows = dict(line.split() for line in open(path))
                return int(rows.get("total_shmem", rows.get("shmem", 0)))
        pytest.skip("the memory cgroup of a container is not where it is looked for: run this on the daemon's machine")

    assert shared("sidecar") >= weights
    assert shared("engine") < weights // 10


def test_kill_9_of_the_sidecar(stack: Stack) -> None:
    """It is started again by policy and takes over; engines that run go on; one that starts anew attaches."""
    before, restarts = stack.ask(), stack.inspect("sidecar")["RestartCount"]
    stack.kill("sidecar")
    until("the sidecar was not restarted", lambda: stack.inspect("sidecar")["RestartCount"] == restarts + 1)
    until("it does not say that it adopts", lambda: f"adopted {MODEL}, generation 1" in stack.log("sidecar"))
    assert stack.ask() == before
    until("it is not healthy again", lambda: stack.inspect("sidecar")["State"]["Health"]["Status"] == "healthy")
    stack.compose("restart", "--timeout", "1", "engine")
    until("the engine is not ready", lambda: stack.log("engine").count("ready on port") == 2)
    assert stack.log("engine").count(f"{MODEL} comes from memory: generation 1") == 2
    assert stack.ask() == before
    assert stack.log("sidecar").count("is ready: generation") == 1  # read from disk once in all this


def test_kill_9_of_an_engine(stack: Stack) -> None:
    before, count = stack.ask(2), stack.log("engine", 2).count("ready on port")
    os.kill(stack.inspect("engine", 2)["State"]["Pid"], 9)
    until("the engine was not restarted", lambda: stack.log("engine", 2).count("ready on port") == count + 1)
    assert stack.ask(2) == before


def test_an_engine_of_another_user(stack: Stack, containers: Callable[..., str]) -> None:
    """Refused, with the remedy, and it loads from disk."""
    shm = stack.container("shm")
    name = containers(
        f"--ipc=container:{shm}", f"--pid=container:{shm}", "--user=1234:1234", "--env=BALLAST_POOL=main",
        "--volumes-from", f"{stack.container('engine')}:ro", "--read-only", "--tmpfs=/tmp",
        "ballast-demo-engine", "/models/smollm2",
    )  # fmt: skip
    until("it does not come up", lambda: "ready on port" in run("docker", "logs", name).stdout)
    said = run("docker", "logs", name).stderr
    assert "run the sidecar and the engine as one user" in said and "loading without Ballast" in said
    done = run("docker", "exec", name, "python3", "-m", "engine_shim", "doctor", "--json", check=False)
    owner = [row for row in json.loads(done.stdout)["findings"] if row["check"] == "owner"]
    assert done.returncode == 1 and "user 65532" in owner[0]["text"] and "compose: user" in owner[0]["remedy"]


def test_a_dev_shm_of_its_own(stack: Stack, containers: Callable[..., str]) -> None:
    """Private IPC: the engine loads from disk, and the doctor in its container names it."""
    name = containers(
        "--env=BALLAST_POOL=main", "--volumes-from", f"{stack.container('engine')}:ro", "--read-only", "--tmpfs=/tmp",
        "ballast-demo-engine", "/models/smollm2",
    )  # fmt: skip
    until("it does not come up", lambda: "ready on port" in run("docker", "logs", name).stdout)
    assert "is not there" in run("docker", "logs", name).stderr
    done = run("docker", "exec", name, "python3", "-m", "engine_shim", "doctor", "--json", check=False)
    findings = {row["check"]: row for row in json.loads(done.stdout)["findings"]}
    pool, room = findings["pool"], findings["room"]
    assert done.returncode == 1 and "private IPC" in pool["text"] and "service:NAME" in pool["remedy"]
    assert room["verdict"] == "note" and "(vLLM: 160 MiB, or it does not start)" in room["text"]


def test_a_gpu_in_two_containers(stack: Stack, containers: Callable[..., str], tmp_path: Path) -> None:
    """docs/gpu-in-two-containers.md, with the emulated driver: what one holds on the GPU another maps, and it is the files'."""
    for name in ("driver", "gpus"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    library = build(tmp_path / "driver").parent
    shm = stack.container("shm")
    gpu = [
        f"--ipc=container:{shm}", f"--pid=container:{shm}", "--read-only", "--cap-drop=ALL", f"--volume={library}:/driver:ro",
        f"--volume={tmp_path / 'gpus'}:/gpus", "--env=LD_LIBRARY_PATH=/driver", "--env=EMU_DIR=/gpus",
        f"--env=EMU_GPUS={A}={400 << 20}",
    ]  # fmt: skip
    containers(*gpu, "ballast-sidecar-cuda", "hold", "--device", "cuda:all")

    def copies() -> dict[str, str]:
        done = run("docker", "exec", stack.container("sidecar"), "ballast", "status", "--json")
        devices: dict[str, str] = json.loads(done.stdout)["pools"][0]["generations"][0]["devices"]
        return devices

    until("there is no copy on the GPU", lambda: copies() == {A: "resident"})
    done = run("docker", "run", "--rm", "--network=none", *gpu, "ballast-sidecar-cuda", "verify", "--device")
    assert A in done.stdout


def test_a_start_script_that_wipes(stack: Stack) -> None:
    """Noticed and named by the sidecar, which starts again and loads again; the engine that did it loads from disk.

    The sidecar stands still meanwhile: it is back within seconds otherwise, and the engine attaches after all.
    """
    program = "import os, glob\nfor p in glob.glob('/dev/shm/*'): os.unlink(p)\n"
    program += "from safetensors.torch import load_file\nprint(len(load_file(glob.glob('/models/*/*.safetensors')[0])))"
    restarts, pid = stack.inspect("sidecar")["RestartCount"], stack.inspect("sidecar")["State"]["Pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        done = run("docker", "exec", "--env=BALLAST_WAIT=0", stack.container("engine"), "python3", "-c", program)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert int(done.stdout) > 0 and "loading without Ballast" in done.stderr
    until("it does not notice", lambda: "does an engine's start script wipe it?" in stack.log("sidecar"))
    until("it is not restarted", lambda: stack.inspect("sidecar")["RestartCount"] == restarts + 1)
    until("it is not ready again", lambda: stack.log("sidecar").count("is ready: generation") == 2)
    until("not healthy", lambda: stack.inspect("sidecar")["State"]["Health"]["Status"] == "healthy")
    assert "Paris" in stack.ask()["text"]  # what it had mapped it has
    count, _ = json.loads(stack.python("engine", COMPARE, BALLAST_MODE="require"))
    assert count == 272
