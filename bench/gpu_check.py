"""One short check of device copies on a real GPU: does it work, how fast is it, and what is seen when somebody dies.

    python bench/gpu_check.py --out gpu.json                 # at most six minutes on one GPU; prints a table, writes JSON
    python bench/gpu_check.py --budget 240 --sizes 1,10,60   # less
    python bench/gpu_check.py --emulated libcuda.so.1        # a dry run against the driver of tests/device

Needs torch, transformers, safetensors and cuda-bindings, and of what a sidecar needs orjson, rich, tenacity, typer and xxhash.
What the machine lacks of these, and cannot fetch, travels as wheels for its Python, 3.12 say:

    pip download --no-deps --only-binary :all: --python-version 3.12 -d wheels orjson tenacity        # here
    pip install --no-index --no-deps --target site wheels/*.whl; export PYTHONPATH=$PWD/site          # there

Every measurement is of processes of their own, forked from this one, which has imported torch and not touched the GPU. The
parts do not depend on each other, what goes wrong becomes a row, no answer is waited for longer than the time that is left, and
the file is written anew after every row.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.util
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GB = 10**9
NEEDED = ("torch", "transformers", "safetensors", "cuda.bindings", "orjson", "rich", "tenacity", "typer", "xxhash")
HANDLES = (1, 10, 60, 100, 120)  # GB of single allocations, whose opening is timed: no host memory is needed for these
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MEMORY = 110 << 30  # bytes of a machine that the largest state needs


# In the processes that are measured -----------------------------------------------------------------------------------


def _emulate(library: str) -> None:
    import ctypes

    import torch

    from engine_shim import device

    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)

    def bytes_at(ordinal: int, pointer: int, nbytes: int, owner: object) -> torch.Tensor:
        buffer: Any = (ctypes.c_ubyte * nbytes).from_address(pointer)
        buffer.owner = owner
        return torch.frombuffer(buffer, dtype=torch.uint8)

    device.bytes_at, device.torch_device = bytes_at, lambda ordinal: torch.device("cpu")


class Child:
    """What a child can be asked. Each method answers with JSON; `self.kept` lives as long as the process."""

    def __init__(self) -> None:
        import torch

        from engine_shim import device

        self.torch, self.device, self.kept = torch, device, {}
        self.where = device.torch_device(0)

    def _sync(self) -> None:
        if self.where.type == "cuda":
            self.torch.cuda.synchronize()

    def start(self) -> None:
        """Makes what an engine has anyway before it loads: torch's context, and ours."""
        self.torch.zeros(1, device=self.where)
        self.device.driver().memory(0)
        self._sync()

    def memory(self) -> list[int]:
        """Free and total bytes of the GPU."""
        return list(self.device.driver().memory(0))

    def grow(self, wanted: int) -> int:
        """Touches memory until this machine says that it has `wanted` bytes, or gives no more; returns what it says then. Some
        machines' memory grows as it is used, and what is not there yet would be taken for a lack of room."""
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        pieces, total, grown = [], meminfo("MemTotal"), time.monotonic()
        while total < wanted and time.monotonic() - grown < 5:
            if meminfo("MemAvailable") > 3 << 30:
                pieces.append(self.torch.empty(1 << 30, dtype=self.torch.uint8).fill_(1))
            else:
                time.sleep(0.1)
            if meminfo("MemTotal") > total:
                total, grown = meminfo("MemTotal"), time.monotonic()
        return total

    # Handles by themselves

    def export(self, size: int) -> str:
        """A plain allocation of `size` bytes, its first and last byte set; its handle."""
        import ctypes

        driver = self.device.driver()
        pointer, handle = ctypes.c_uint64(), (ctypes.c_ubyte * 64)()
        with driver.context(0).current():
            driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
            self.kept["exported"] = pointer
            for at in (0, size - 1):
                driver.call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer.value + at), b"\x5a", ctypes.c_size_t(1))
            driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return base64.b64encode(bytes(handle)).decode()

    def free(self) -> None:
        driver = self.device.driver()
        with driver.context(0).current():
            driver.call("cuMemFree_v2", self.kept.pop("exported"))

    def open_handle(self, handle: str, size: int) -> dict[str, Any]:
        """Opens it as an engine does, reads its two ends as tensors, and closes it."""
        from engine_shim.handoff.manifest import Window

        driver, before = self.device.driver(), self.memory()[0]
        began = time.perf_counter()
        opened = self.device.Import(driver, 0, Window(base64.b64decode(handle), size, 0))
        took = time.perf_counter() - began
        ends = [self.device.bytes_at(0, opened.pointer + at, 1, opened).item() for at in (0, size - 1)]
        self._sync()
        opened.close_after(driver)
        after = self.memory()[0]
        again = time.perf_counter()
        del opened
        return {"open_s": took, "close_s": time.perf_counter() - again, "right": ends == [0x5A, 0x5A], "bytes": before - after}

    # States

    def _module(self, count: int, size: int, seed: int | None) -> Any:
        module = self.torch.nn.Module()
        for index in range(count):
            if seed is None:
                data = self.torch.empty(size, dtype=self.torch.uint8, device="meta")
            else:
                generator = self.torch.Generator(self.where).manual_seed(seed + index)
                data = self.torch.randint(0, 256, (size,), dtype=self.torch.uint8, device=self.where, generator=generator)
            module.register_parameter(f"p{index}", self.torch.nn.Parameter(data, requires_grad=False))
        return module

    def publish(self, name: str, count: int, size: int) -> float:
        """Random bytes, made on the GPU, handed over as an engine's state; seconds until they are in service."""
        import engine_shim

        module = self._module(count, size, 1)
        self._sync()
        began = time.perf_counter()
        engine_shim.publish(module, name, wait=300)
        return time.perf_counter() - began

    def attach(self, name: str, count: int, size: int) -> dict[str, float]:
        """Maps a state into a module on the GPU: how long the whole took, and the opening of the handles alone."""
        import engine_shim
        from engine_shim import onboard

        module = self._module(count, size, None)
        self.start()
        opened = 0.0
        original = self.device.Import.__init__

        def timed(*arguments: Any) -> None:
            nonlocal opened
            began = time.perf_counter()
            original(*arguments)
            opened += time.perf_counter() - began

        self.device.Import.__init__ = timed
        began = time.perf_counter()
        self.kept[name] = engine_shim.attach(module, name, device="cuda:0")
        took = time.perf_counter() - began
        self.device.Import.__init__ = original
        return {"attach_s": took, "open_s": opened, "shared": len(list(onboard.shared_slots(self.kept[name])))}

    def compare(self, name: str, count: int, size: int) -> bool:
        """Every byte on the GPU with every byte in host memory."""
        import engine_shim

        host = engine_shim.attach(self._module(count, size, None), name)
        pairs = zip(self.kept[name].parameters(), host.parameters(), strict=True)
        return all(self.torch.equal(mine, other.to(self.where)) for mine, other in pairs)

    def checksum(self, name: str) -> str:
        """Of what this process sees in mapped memory now; or what the driver says instead."""
        try:
            total = 0
            for parameter in self.kept[name].parameters():
                total ^= int(parameter.data.view(self.torch.int64).sum().item())
            self._sync()
            return str(total)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]

    # Files

    def load_file(self, paths: list[str]) -> float:
        import safetensors.torch

        self.start()
        began = time.perf_counter()
        for path in paths:
            self.kept[path] = safetensors.torch.load_file(path, device=str(self.where))
        self._sync()
        return time.perf_counter() - began

    def open(self, name: str) -> float:
        import engine_shim

        self.start()
        began = time.perf_counter()
        self.kept[name] = dict(engine_shim.open(name, device="cuda:0").tensors)
        return time.perf_counter() - began

    def read(self, name: str) -> float:
        """Seconds to read every byte of what `open` has mapped."""
        self._sync()
        began = time.perf_counter()
        for tensor in self.kept[name].values():
            tensor.view(self.torch.int16).sum()
        self._sync()
        return time.perf_counter() - began

    def pinned_rate(self, size: int) -> float:
        """Bytes a second from pinned host memory, the best of five."""
        host = self.torch.empty(size, dtype=self.torch.uint8, pin_memory=self.where.type == "cuda").fill_(1)
        target = self.torch.empty(size, dtype=self.torch.uint8, device=self.where)
        best = 0.0
        for _ in range(5):
            self._sync()
            began = time.perf_counter()
            target.copy_(host, non_blocking=True)
            self._sync()
            best = max(best, size / (time.perf_counter() - began))
        return best

    # torch's own sharing

    def torch_share(self, path: str, count: int, size: int) -> None:
        """Its reduction of CUDA tensors, pickled into a file for another process."""
        import io
        from multiprocessing.reduction import ForkingPickler

        import torch.multiprocessing

        self.kept["shared"] = [p.data for p in self._module(count, size, 5).parameters()]
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(self.kept["shared"])
        Path(path).write_bytes(buffer.getvalue())
        assert torch.multiprocessing

    def torch_open(self, path: str) -> float:
        import pickle

        import torch.multiprocessing

        assert torch.multiprocessing
        self.start()
        began = time.perf_counter()
        self.kept["opened"] = pickle.loads(Path(path).read_bytes())  # noqa: S301  (torch shares by pickle, which is what is measured; `torch_share` wrote it just now)
        self._sync()
        return time.perf_counter() - began

    # A model

    def make_model(self, folder: str, hidden: int, layers: int) -> str:
        import transformers

        self.torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=max(4, hidden // 128), num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=True,
        )  # fmt: skip
        with self.where:  # on the GPU it is made in no time
            model = transformers.LlamaForCausalLM(config).to(self.torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="1GB")
        return f"{sum(p.numel() for p in model.parameters()):,} parameters"

    def tokens(self, folder: str, name: str | None) -> dict[str, Any]:
        """Greedy tokens of a transformers model: loaded from its files, or with `name` attached."""
        import transformers

        import engine_shim

        assert transformers.LlamaForCausalLM  # imported now, which is no part of what is measured
        self.start()
        began = time.perf_counter()
        if name is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self.torch.bfloat16).to(self.where)
        else:
            config = transformers.AutoConfig.from_pretrained(folder)
            with self.torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.torch.bfloat16)
            # Not part of a checkpoint, so it cannot come from one.
            model.model.rotary_emb = type(model.model.rotary_emb)(config).to(self.where)
            engine_shim.attach(model, name, checkpoint=folder, device="cuda:0")
        self._sync()
        took = time.perf_counter() - began
        prompt = self.torch.arange(1, 17, device=self.where)[None]
        out = model.eval().generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
        return {"tokens": out[0].tolist(), "load_s": took}


def meminfo(name: str) -> int:
    """Bytes, as /proc/meminfo has it."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def serve_child(requests: int, answers: int, emulated: str | None) -> None:
    """A child's life: answers one JSON request a line, until its input ends."""
    os.dup2(2, 1)
    if emulated:
        _emulate(emulated)
    asked = Child()
    with open(requests) as lines, open(answers, "w") as out:
        for line in lines:
            name, arguments = json.loads(line)
            try:
                answer = [True, getattr(asked, name)(*arguments)]
            except Exception as error:
                answer = [False, f"{type(error).__name__}: {error}"]
            print(json.dumps(answer), file=out, flush=True)


# In the process that measures -------------------------------------------------------------------------------------------


class Process:
    """A child, asked by calling it."""

    def __init__(self, check: Check, **environ: str) -> None:
        self._check = check
        theirs, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._read = b""
        self.code: int | None = None
        if not check.forks:
            for fd in (theirs, answers):
                os.set_inheritable(fd, True)
            command = [sys.executable, __file__, "--child", f"{theirs},{answers}"]
            command += ["--emulated", check.emulated] if check.emulated else []
            self.pid = os.posix_spawn(sys.executable, command, {**check.environ, **environ})
        else:
            self.pid = os.fork()
        if self.pid == 0:
            # From here on in the child.
            code = 1
            try:
                for fd in (self._requests, self._answers, *check.ends):
                    os.close(fd)
                for name in [name for name in os.environ if name.startswith("BALLAST_")]:
                    del os.environ[name]
                os.environ.update({**check.environ, **environ})
                serve_child(theirs, answers, check.emulated)
                sys.stderr.flush()
                code = 0
            finally:
                # What is kept goes here, as a program's does at its end; the parent's handlers are not ours to run.
                with contextlib.suppress(Exception):
                    import weakref

                    weakref.finalize._exitfunc()  # type: ignore[attr-defined]
                os._exit(code)
        os.close(theirs)
        os.close(answers)
        check.ends |= {self._requests, self._answers}

    def __call__(self, name: str, *arguments: Any, limit: float = 150) -> Any:
        os.write(self._requests, (json.dumps([name, arguments]) + "\n").encode())
        until = time.monotonic() + max(5.0, min(limit, self._check.left + 20))
        while b"\n" not in self._read:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                self.kill()
                raise RuntimeError(f"no answer to {name} in time: the process was killed")
            more = os.read(self._answers, 1 << 16)
            if not more:
                raise RuntimeError(f"the process ended during {name}, with {self.wait(5)}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        fine, answer = json.loads(line)
        if not fine:
            raise RuntimeError(answer)
        return answer

    def wait(self, seconds: float) -> int | None:
        """Its exit code, or the negative of the signal that ended it; None if it still runs after this time."""
        until = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                return None
            else:
                time.sleep(0.005)
        return self.code

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._requests, self._answers):
            self._check.ends.discard(fd)
            os.close(fd)
        if self.wait(20) is None:
            self.kill()


class Check:
    """The whole run: its rows, its time, its place in memory."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.forks = driver_is_untouched()
        self.emulated: str | None = options.emulated and os.path.abspath(options.emulated)
        self.unit = 10**6 if self.emulated else GB
        self.label = "MB" if self.emulated else "GB"
        self.sizes = [float(size) for size in options.sizes.split(",")]
        self.out: Path = options.out
        self.began = time.monotonic()
        self.until = self.began + options.budget
        self.rows: dict[str, Any] = {}
        self.machine = describe()
        self.ends: set[int] = set()  # our ends of the children's pipes, which other children must not hold open
        self.folder, self.mounted = place()
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("BALLAST_")}
        path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self.environ.update(PYTHONPATH=os.pathsep.join(filter(None, path)), HF_HUB_OFFLINE="1")
        self.environ.update(BALLAST_ON_SIDECAR_LOSS="warn", BALLAST_DIR=str(self.folder))
        if self.emulated:
            library = str(Path(self.emulated).parent)
            self.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH"))))

    @property
    def left(self) -> float:
        return self.until - time.monotonic()

    def row(self, what: str, measure: Callable[[], Any], needs: float = 0.0) -> Any:
        """Takes one row, if `needs` seconds are left; what goes wrong becomes its value. Writes the file anew."""
        if self.left < needs:
            self.rows[what] = f"not taken: {self.left:.0f} s were left, of the {needs:.0f} that it may need"
        else:
            try:
                self.rows[what] = measure()
            except Exception as error:
                self.rows[what] = f"failed: {type(error).__name__}: {error}"[:300]
        print(f"[{time.monotonic() - self.began:5.1f} s] {what}: {self.rows[what]}", file=sys.stderr, flush=True)
        self.write()
        return self.rows[what]

    def write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "machine": self.machine, "emulated": bool(self.emulated), "unit": self.label,
            "forks": self.forks, "seconds": time.monotonic() - self.began, "rows": self.rows,
        }  # fmt: skip
        new = self.out.with_name(self.out.name + ".tmp")
        new.write_text(json.dumps(result, indent=1) + "\n")
        new.rename(self.out)

    def everything(self) -> None:
        parts: list[tuple[str, Callable[[], None]]] = [
            ("machine", self.machine_part), ("handles", self.handle_part), ("torch's own sharing", self.torch_part),
            ("deaths", self.death_part), *map(self.size, self.sizes[:2]), ("checkpoint", self.checkpoint_part),
            ("model", self.model_part), *map(self.size, self.sizes[2:]),
        ]  # fmt: skip
        for what, part in parts:
            if self.left <= 0:
                self.rows[f"{what}: this part"] = "not taken: the time was used up"
                continue
            try:
                part()
            except Exception as error:
                self.rows[f"{what}: the rest of this part"] = f"failed: {type(error).__name__}: {error}"[:300]
                self.write()

    def size(self, size: float) -> tuple[str, Callable[[], None]]:
        return f"{size:g} {self.label}", lambda: self.size_part(size)

    @contextlib.contextmanager
    def sidecar(self, *checkpoints: Path, way: str = "staged") -> Iterator[SidecarProcess]:
        self.environ["BALLAST_POOL"] = f"gpu-check-{secrets.token_hex(4)}"
        made = SidecarProcess(self, checkpoints, way)
        try:
            yield made
        finally:
            made.stop()

    # The parts

    def machine_part(self) -> None:
        with Process(self) as one:
            self.row("GPU memory, free and total", lambda: one("memory"))
            self.row("pinned rate, GB/s", lambda: one("pinned_rate", self.unit) / GB)
        if not self.emulated:
            with Process(self) as one:
                self.row("this machine's memory", lambda: one("grow", MEMORY, limit=60))

    def handle_part(self) -> None:
        """One allocation of each size, opened by another process: no sidecar, no host memory."""
        for size in HANDLES:
            what, count = f"{size} {self.label}: one handle", size * self.unit // 4096 * 4096
            with Process(self) as exporter, Process(self) as importer:
                importer("start")
                free = exporter("memory")[0]
                if count > free - (self.unit // 2):
                    self.rows[what] = f"not taken: {free / GB:.1f} GB are free on the GPU"
                    continue
                self.row(what, lambda: self.one_handle(exporter, importer, count))  # noqa: B023  (called at once)

    @staticmethod
    def one_handle(exporter: Process, importer: Process, count: int) -> dict[str, Any]:
        handle = exporter("export", count)
        try:
            found: dict[str, Any] = importer("open_handle", handle, count)
        finally:
            exporter("free")
        if not found["right"]:
            raise RuntimeError(f"the importer saw other bytes: {found}")
        return found

    def torch_part(self) -> None:
        for size in (1, 10, 60):
            what = f"{size} {self.label}: torch's own sharing, s"
            if self.emulated:
                self.rows[what] = "not taken: torch knows nothing of the emulated driver"
                continue
            path = str(self.folder / "torch")
            with Process(self) as exporter, Process(self) as importer:
                importer("start")
                exporter("torch_share", path, size, self.unit)
                self.row(what, lambda: importer("torch_open", path))  # noqa: B023  (called at once)

    def death_part(self) -> None:
        """kill -9 of each side, and what a process that has mapped memory then sees."""
        part = self.unit // 4096 * 4096
        with self.sidecar() as sidecar:
            with Process(self) as one:
                one("publish", "state", 1, part)
            sidecar.resident("state", "engine")
            ending = Process(self, BALLAST_ON_SIDECAR_LOSS="exit")
            with Process(self) as importer, Process(self) as other, Process(self) as observer, ending:
                for process in (importer, other, ending):
                    process("attach", "state", 1, part)
                truth = importer("checksum", "state")
                other.kill()
                self.row("after kill -9 of another engine", lambda: importer("checksum", "state") == truth)
                sidecar.kill()
                self.row("after kill -9 of the sidecar", lambda: importer("checksum", "state") == truth)
                with Process(self) as third:
                    self.row("attaching without a sidecar", lambda: third("attach", "state", 1, part))
                free = observer("memory")[0]
                sidecar.kill_holder()
                began = time.monotonic()
                self.row(
                    "after kill -9 of the holder: an engine with the default policy ends",
                    lambda: {"code": ending.wait(15), "after_s": time.monotonic() - began},
                )

                def seen() -> str:
                    now = str(importer("checksum", "state", limit=20))
                    return "the same bytes" if now == truth else "other bytes" if now.lstrip("-").isdigit() else now

                self.row("after kill -9 of the holder: another importer sees", seen)
                self.row("after kill -9 of the holder: bytes that came free", lambda: observer("memory")[0] - free)
                with Process(self) as filler:
                    self.row("another process fills as much", lambda: filler("pinned_rate", part) > 0)
                self.row("then that importer sees", lambda: "nothing: it has ended" if importer.code is not None else seen())
                importer.kill()
                self.row("after kill -9 of the importer: bytes that came free", lambda: observer("memory")[0] - free)
                with Process(self) as fourth:
                    self.row("attaching without a holder, from host memory", lambda: fourth("attach", "state", 1, part))
                    self.row("its bytes are right", lambda: fourth("checksum", "state") == truth)
            sidecar.again()
            self.row("a new sidecar's upload, GB/s", lambda: sidecar.resident("state", "engine") / GB)
            with Process(self) as last:
                self.row("attaching to that", lambda: last("attach", "state", 1, part))
                self.row("its bytes are right as well", lambda: last("checksum", "state") == truth)

    def checkpoint_part(self) -> None:
        """A checkpoint of files against `load_file`: time until all tensors are on the GPU."""
        folder = self.folder / "checkpoint"
        try:
            size = write_checkpoint(folder, 8 * self.unit, self.unit)
            files = sorted(map(str, folder.glob("*.safetensors")))
            with Process(self, BALLAST_MODE="off") as one:
                what = f"{size / self.unit:.3g} {self.label}: load_file from memory to the GPU, s"
                self.row(what, lambda: one("load_file", files))
            for way in ("staged", "registered"):
                with self.sidecar(folder, way=way) as sidecar:
                    self.row(f"upload, {way}, GB/s", lambda: sidecar.resident("checkpoint") / GB)
                    if way == "staged":
                        self.opened_part(sidecar)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def opened_part(self, sidecar: SidecarProcess) -> None:
        with Process(self) as one:
            self.row("the same, open on the GPU, s", lambda: one("open", "checkpoint"))
            self.row("and every byte read there, s", lambda: one("read", "checkpoint"))
        with Process(self) as first, Process(self) as second:
            self.row("memory of two engines", lambda: self.two_engines(first, second))
        self.row("every byte by digest (ballast verify --device)", sidecar.verify)

    @staticmethod
    def two_engines(first: Process, second: Process) -> dict[str, int]:
        first("start")
        before = first("memory")[0]
        second("start")
        contexts = first("memory")[0]
        first("open", "checkpoint")
        one = first("memory")[0]
        second("open", "checkpoint")
        return {"context": before - contexts, "first": contexts - one, "second": one - first("memory")[0]}

    def model_part(self) -> None:
        folder = self.folder / "model"
        hidden, layers = (256, 2) if self.emulated else (2048, 16)
        try:
            with Process(self, BALLAST_MODE="off") as one:
                self.row("a transformers model", lambda: one("make_model", str(folder), hidden, layers))
                truth = self.row("model from its files", lambda: one("tokens", str(folder), None))
            with self.sidecar(folder) as sidecar:
                self.row("model's upload, GB/s", lambda: sidecar.resident("model") / GB)
                with Process(self) as one:
                    got = self.row("model attached", lambda: one("tokens", str(folder), "model"))
            self.row("equal tokens", lambda: truth["tokens"] == got["tokens"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def size_part(self, size: float) -> None:
        """One size: published by an engine, mapped by others. The publisher ends before the copy is made: so it is on the GPU
        once. In host memory it is once as well."""
        label, name = f"{size:g} {self.label}", "state"
        part = int(min(size, 1.0) * self.unit) // 4096 * 4096
        count = max(1, round(size * self.unit / part))
        needs = 0.0 if self.emulated else 12 + 1.1 * size  # seconds: a guess, on the safe side
        with self.sidecar() as sidecar:
            with Process(self) as one:
                on_gpu = one("memory")[0]
                in_memory = room_in(self.folder)
                if count * part > 0.98 * min(on_gpu, in_memory):
                    text = f"not taken: {on_gpu / GB:.1f} GB are free on the GPU, {in_memory / GB:.1f} GB in memory"
                    self.rows[label] = text
                    return
                made = self.row(f"{label}: publishing, s", lambda: one("publish", name, count, part), needs)
                if not isinstance(made, float):
                    return
            rate = self.row(f"{label}: upload, GB/s", lambda: sidecar.resident(name, "engine") / GB)
            if not isinstance(rate, float):
                return
            with Process(self) as one:
                self.row(f"{label}: attach and opening of handles, s", lambda: one("attach", name, count, part))
                self.row(f"{label}: every byte is as in host memory", lambda: one("compare", name, count, part), needs / 3)


class SidecarProcess:
    """`ballast serve --device cuda:0` of this tree."""

    def __init__(self, check: Check, checkpoints: tuple[Path, ...], way: str) -> None:
        from engine_shim.handoff.names import PoolPaths

        self.paths = PoolPaths(check.environ["BALLAST_POOL"], check.folder)
        self._log = tempfile.TemporaryFile()
        self._check = check
        empty = check.folder / "nothing"
        if not checkpoints and not empty.exists():
            write_checkpoint(empty, 64 * 512, 64 * 512)
        served = map(str, checkpoints or (empty,))
        self._command = [sys.executable, "-m", "sidecar", "serve", *served, "--pool", self.paths.pool, "--device", "cuda:0"]
        self._environ = {**check.environ, "BALLAST_UPLOAD": way}
        self.again()

    def again(self) -> None:
        """Starts it, on the pool that may be there, and waits until it has the pool."""
        from engine_shim.handoff.catalog import ControlPage
        from engine_shim.handoff.errors import HandoffError

        self.process = subprocess.Popen(self._command, env=self._environ, stdout=self._log, stderr=self._log, cwd=ROOT)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(HandoffError):
                page = ControlPage.open(self.paths)
                try:
                    if page.sidecar_alive:
                        return
                finally:
                    page.close()
            time.sleep(0.02)
        raise RuntimeError(f"the sidecar does not start: {self.log[-300:]}")

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def resident(self, name: str, kind: str = "checkpoint") -> float:
        """Waits for the copy, by a holder that lives; its upload's bytes a second, as the holder has measured it."""
        from engine_shim.handoff import holder, manifest
        from engine_shim.handoff.catalog import ControlPage
        from engine_shim.handoff.errors import HandoffError

        deadline = time.monotonic() + max(5.0, min(120.0, self._check.left + 10))
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(HandoffError):
                page = ControlPage.open(self.paths)
                try:
                    found = [g for g in page.read().of_model(name, "ready") if g.kind == kind]
                finally:
                    page.close()
                contents = manifest.read(self.paths.manifest(found[0].number)) if found else None
                living = {one.identifier for one in holder.alive(self.paths)}
                if contents is not None and any(copy.holder in living for copy in contents.devices):
                    # Of what was left to be uploaded once everything was loaded: some has gone up meanwhile.
                    line = rf"{name}, generation {contents.generation}, is in the memory of .*: ([\d.]+) (\w+), ([\d.]+) s,"
                    told = re.findall(line, self.log)
                    if not told:
                        return 0.0
                    size, unit, seconds = told[-1]
                    return float(size) * UNITS[unit] / max(float(seconds), 0.005)  # it is told in hundredths
            time.sleep(0.02)
        raise RuntimeError(f"no copy: {self.log[-300:]}")

    def verify(self) -> str:
        command = [sys.executable, "-m", "sidecar", "verify", "--device", "--pool", self.paths.pool]
        done = subprocess.run(command, env=self._check.environ, capture_output=True, text=True, cwd=ROOT, timeout=120)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-300:])
        return "intact"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_holder(self) -> None:
        from engine_shim.handoff import holder

        for one in holder.alive(self.paths):
            os.kill(one.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ends it, its holder and its pool, whatever state they are in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        command = [sys.executable, "-m", "sidecar", "purge", "--force", "--pool", self.paths.pool]
        if any(self.paths.dir.glob(f"ballast-{self.paths.pool}.*")):
            subprocess.run(command, env=self._check.environ, capture_output=True, cwd=ROOT, timeout=60)
        self.kill_holder()
        self._log.close()


def driver_is_untouched() -> bool:
    """Whether nothing in this process has initialised the driver: a child that is forked afterwards could not use it."""
    import ctypes

    not_initialised = 3
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == not_initialised)
    except OSError:
        return True


def write_checkpoint(folder: Path, size: int, each: int) -> int:
    """Random files in the layout of safetensors, `each` bytes every one; returns their bytes."""
    folder.mkdir()
    part = each // 64 // 512 * 512
    for number in range(size // each):
        rows = {
            f"t{number}.{i}": {"dtype": "BF16", "shape": [part // 2], "data_offsets": [i * part, (i + 1) * part]}
            for i in range(64)
        }
        header = json.dumps(rows).encode()
        with open(folder / f"{number}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            block = os.urandom(part)
            for i in range(64):
                file.write(block[i:] + block[:i])
    return size // each * 64 * part


def place() -> tuple[Path, bool]:
    """A folder in memory for pools and files, and whether it is a file system of its own. /dev/shm is often small."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=95%,mode=0700", "tmpfs", str(folder)]
    if meminfo("MemTotal") < MEMORY:
        mount[4] = f"size={MEMORY},mode=0700"  # what is said now may be less than there will be
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        shutil.rmtree(folder, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix="gpu-check-", dir="/dev/shm")), False
    return folder, True


def room_in(folder: Path) -> int:
    from engine_shim.handoff import room

    return room.room(folder).bytes


def describe() -> dict[str, Any]:
    """The machine, as far as it says."""
    import torch

    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": sys.version.split()[0], "torch": torch.__version__}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    found["memory"], found["kernel"] = meminfo("MemTotal"), os.uname().release
    return found


def table(rows: dict[str, Any]) -> str:
    width = max(map(len, rows))
    lines = []
    for what, value in rows.items():
        if isinstance(value, dict):
            value = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in value.items()}
        text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, dict) else str(value)
        lines.append(f"{what.ljust(width)}  {text[:160]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10,100,60,1", help="of states, in GB, in this order (default 10,100,60,1)")
    parser.add_argument("--budget", type=float, default=320, help="seconds after which no new row is begun (default 320)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu.json")
    parser.add_argument("--emulated", help="the emulated libcuda.so.1; sizes are then in MB")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve_child(*map(int, options.child.split(",")), options.emulated)
        return 0
    missing = [name for name in NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        print(f"gpu_check: {', '.join(missing)} cannot be imported: see the first lines of this file", file=sys.stderr)
        return 2
    # Once, for all processes that are forked from this one. Not transformers, which may look for GPUs when it is imported.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # torch looks for GPUs without initialising the driver
    import safetensors.torch
    import torch

    import engine_shim.api

    assert safetensors and torch and engine_shim.api
    check = Check(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever stops it early gets a clean machine, and the rows so far
    try:
        check.everything()
    finally:
        if check.mounted:
            subprocess.run(["umount", "-l", str(check.folder)], capture_output=True)
        shutil.rmtree(check.folder, ignore_errors=True)
        check.write()
        print(table(check.rows))
    failed = [what for what, value in check.rows.items() if value is False or str(value).startswith("failed")]
    if failed:
        print(f"gpu_check: {len(failed)} rows are not as they should be: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
