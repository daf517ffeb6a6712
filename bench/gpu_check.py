"""One short check of device copies on a real GPU: does it work, how fast is it, and what is seen when somebody dies.

    python bench/gpu_check.py                                # at most six minutes on one GPU; writes bench/results/gpu.json
    python bench/gpu_check.py --budget 300 --sizes 1,10,60   # less
    python bench/gpu_check.py --emulated libcuda.so.1        # a dry run against the driver of tests/device

Needs torch, transformers, safetensors and cuda-bindings, and what a sidecar needs. Where there is no network, take that along
as wheels, for the Python that is there, and use them with --wheels bench/.wheels:

    pip download --only-binary :all: --python-version 3.12 -d bench/.wheels rich tenacity typer xxhash orjson

Every measurement is of processes of their own. Rows that could not be taken are in the table with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_shim.handoff import room

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9


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

        import engine_shim.api  # whose import is no part of what is measured
        from engine_shim import device

        assert engine_shim.api
        self.torch, self.device, self.kept = torch, device, {}
        self.where = device.torch_device(0)

    def _sync(self) -> None:
        if self.where.type == "cuda":
            self.torch.cuda.synchronize()

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

    def publish(self, name: str, count: int, size: int) -> None:
        """Random bytes, made on the GPU, handed over as an engine's state."""
        import engine_shim

        engine_shim.publish(self._module(count, size, 1), name, wait=300)

    def attach(self, name: str, count: int, size: int) -> dict[str, float]:
        """Maps a state into a module on the GPU: how long the whole took, and the opening of the handles alone."""
        import engine_shim
        from engine_shim import onboard

        module = self._module(count, size, None)
        self.torch.zeros(1, device=self.where)  # the context, which an engine has anyway
        self.device.driver().context(0)
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

    def memory(self) -> list[int]:
        return list(self.device.driver().memory(0))

    def load_file(self, paths: list[str]) -> float:
        import safetensors.torch

        self.torch.zeros(1, device=self.where)
        began = time.perf_counter()
        for path in paths:
            self.kept[path] = safetensors.torch.load_file(path, device=str(self.where))
        self._sync()
        return time.perf_counter() - began

    def open(self, name: str) -> float:
        import engine_shim

        self.torch.zeros(1, device=self.where)
        self.device.driver().context(0)
        began = time.perf_counter()
        self.kept[name] = dict(engine_shim.open(name, device="cuda:0").tensors)
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

    def torch_share(self, path: str, count: int, size: int) -> None:
        """torch's own way: its reduction of CUDA tensors, pickled into a file for another process."""
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
        self.torch.zeros(1, device=self.where)
        began = time.perf_counter()
        self.kept["opened"] = pickle.loads(Path(path).read_bytes())  # noqa: S301  (torch shares by pickle, which is what is measured; `torch_share` wrote it just now)
        self._sync()
        return time.perf_counter() - began

    def make_model(self, folder: str, hidden: int, layers: int) -> None:
        import transformers

        self.torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=max(4, hidden // 128), num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).to(self.torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="1GB")

    def tokens(self, folder: str, name: str | None) -> dict[str, Any]:
        """Greedy tokens of a transformers model: loaded from its files, or with `name` attached."""
        import transformers

        import engine_shim

        began = time.perf_counter()
        if name is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self.torch.bfloat16).to(self.where)
        else:
            config = transformers.AutoConfig.from_pretrained(folder)
            with self.torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.torch.bfloat16)
            rotary = type(model.model.rotary_emb)(config)
            model.model.rotary_emb = rotary  # not part of a checkpoint, so it cannot come from one
            engine_shim.attach(model, name, checkpoint=folder, device="cuda:0")
        self._sync()
        took = time.perf_counter() - began
        prompt = self.torch.arange(1, 17, device=self.where)[None]
        out = model.eval().generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)
        return {"tokens": out[0].tolist(), "load_s": took}


def child(emulated: str | None) -> None:
    """Answers one JSON request a line, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if emulated:
        _emulate(emulated)
    asked = Child()
    print(json.dumps(["ready"]), file=answers, flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = [True, getattr(asked, name)(*arguments)]
        except Exception as error:
            answer = [False, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), file=answers, flush=True)


# In the process that measures -------------------------------------------------------------------------------------------


class Process:
    """A child, asked by calling it."""

    def __init__(self, check: Check, **environ: str) -> None:
        command = [sys.executable, __file__, "--child", *(["--emulated", check.emulated] if check.emulated else [])]
        self.process = subprocess.Popen(
            command, env={**check.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self._receive()

    def _receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a child ended with {self.process.wait()}")
        return json.loads(line)

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        fine, answer = self._receive()
        if not fine:
            raise RuntimeError(answer)
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class Check:
    """The whole run: its rows, its time, its pool."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.emulated: str | None = options.emulated and os.path.abspath(options.emulated)
        self.unit = 10**6 if self.emulated else GB
        self.label = "MB" if self.emulated else "GB"
        self.sizes = [float(size) for size in options.sizes.split(",")]
        self.until = time.monotonic() + options.budget
        self.rows: dict[str, Any] = {}
        self.pool = f"gpu-check-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="gpu-check-", dir=options.scratch))
        paths = [str(ROOT), options.packages or "", os.environ.get("PYTHONPATH", "")]
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("BALLAST_")}
        self.environ.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), BALLAST_POOL=self.pool, HF_HUB_OFFLINE="1")
        self.environ["BALLAST_ON_SIDECAR_LOSS"] = "warn"
        if self.emulated:
            library = str(Path(self.emulated).parent)
            self.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (library, os.environ.get("LD_LIBRARY_PATH"))))

    def row(self, what: str, measure: Callable[[], Any]) -> Any:
        """Takes one row; what goes wrong becomes its value, and the others are taken all the same."""
        if time.monotonic() > self.until:
            self.rows[what] = "not taken: the time was used up"
            return None
        try:
            self.rows[what] = measure()
        except Exception as error:
            self.rows[what] = f"failed: {type(error).__name__}: {error}"[:300]
        print(f"{what}: {self.rows[what]}", file=sys.stderr, flush=True)
        return self.rows[what]

    @contextlib.contextmanager
    def sidecar(self, *checkpoints: Path, way: str = "staged") -> Iterator[SidecarProcess]:
        made = SidecarProcess(self, checkpoints, way)
        try:
            yield made
        finally:
            made.stop()

    # The parts

    def everything(self) -> None:
        with Process(self) as one:
            self.row("pinned rate, GB/s", lambda: one("pinned_rate", self.unit) / GB)
            self.row("GPU memory, free and total", lambda: one("memory"))
        self.checkpoint_part()
        self.model_part()
        for size in self.sizes:
            self.size_part(size)
        self.death_part()

    def checkpoint_part(self) -> None:
        """A checkpoint of files against `load_file`: time until all tensors are on the GPU."""
        folder = self.folder / "checkpoint"
        self.write_checkpoint(folder, int(4 * self.unit))
        files = sorted(map(str, folder.glob("*.safetensors")))
        with Process(self, BALLAST_MODE="off") as one:
            self.row("load_file to the GPU, warm page cache, s", lambda: one("load_file", files))
        for way in ("staged", "registered"):
            with self.sidecar(folder, way=way) as sidecar:
                self.row(f"upload, {way}, GB/s", lambda sidecar=sidecar: sidecar.resident("checkpoint") / GB)
                if way == "staged":
                    with Process(self) as one:
                        self.row("open on the GPU, s", lambda: one("open", "checkpoint"))
                    self.row("every byte by digest (ballast verify --device)", sidecar.verify)
                    with Process(self) as first, Process(self) as second:
                        self.row("memory of two engines", lambda: self.two_engines(first, second))
        shutil.rmtree(folder, ignore_errors=True)

    def two_engines(self, first: Process, second: Process) -> dict[str, int]:
        before = first("memory")[0]
        second("memory")  # its context is there already
        contexts = first("memory")[0]
        first("open", "checkpoint")
        one = first("memory")[0]
        second("open", "checkpoint")
        return {"context": before - contexts, "first": contexts - one, "second": one - first("memory")[0]}

    def write_checkpoint(self, folder: Path, size: int) -> None:
        """Random files in the layout of safetensors, a gigabyte each."""
        folder.mkdir()
        each, tensors = min(size, self.unit), 64
        part = each // tensors // 512 * 512
        for number in range(max(1, size // each)):
            rows = {f"t{number}.{i}": {"dtype": "BF16", "shape": [part // 2], "data_offsets": [i * part, (i + 1) * part]}
                    for i in range(tensors)}  # fmt: skip
            header = json.dumps(rows).encode()
            with open(folder / f"{number}.safetensors", "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                block = os.urandom(part)
                for i in range(tensors):
                    file.write(block[i:] + block[:i])

    def model_part(self) -> None:
        folder = self.folder / "model"
        hidden, layers = (256, 2) if self.emulated else (2048, 16)
        with Process(self, BALLAST_MODE="off") as one:
            self.row("a transformers model", lambda: one("make_model", str(folder), hidden, layers) or "made")
            truth = self.row("model from its files", lambda: one("tokens", str(folder), None))
        with self.sidecar(folder) as sidecar:
            self.row("model's upload, GB/s", lambda: sidecar.resident("model") / GB)
            with Process(self) as one:
                got = self.row("model attached", lambda: one("tokens", str(folder), "model"))
        if isinstance(truth, dict) and isinstance(got, dict):
            self.rows["equal tokens"] = truth["tokens"] == got["tokens"]

    def size_part(self, size: float) -> None:
        """One size: published by an engine, mapped by others."""
        label = f"{size:g} {self.label}"
        part = int(min(size, 1.0) * self.unit) // 4096 * 4096
        count = max(1, round(size * self.unit / part))
        name = "state"
        with Process(self) as one:
            on_gpu = one("memory")[0]
        in_memory = room.room(Path("/dev/shm")).bytes
        if count * part > 0.98 * min(on_gpu, in_memory):
            self.rows[label] = f"not taken: {on_gpu / GB:.1f} GB are free on the GPU, {in_memory / GB:.1f} GB in /dev/shm"
            return
        with self.sidecar() as sidecar:
            with Process(self) as one:
                if self.row(f"{label}: publishing", lambda: one("publish", name, count, part) or "done") != "done":
                    return
            rate = self.row(f"{label}: upload, GB/s", lambda: sidecar.resident(name, "engine") / GB)
            if not isinstance(rate, float):
                return
            with Process(self) as one:
                self.row(f"{label}: attach and opening of handles, s", lambda: one("attach", name, count, part))
                self.row(f"{label}: every byte is as in host memory", lambda: one("compare", name, count, part))
            if size <= 10:
                self.torch_part(label, count, part)

    def torch_part(self, label: str, count: int, part: int) -> None:
        if self.emulated:
            self.rows[f"{label}: torch's own sharing, s"] = "not taken: torch knows nothing of the emulated driver"
            return
        place = str(self.folder / "torch")
        with Process(self) as exporter, Process(self) as importer:
            exporter("torch_share", place, count, part)
            self.row(f"{label}: torch's own sharing, s", lambda: importer("torch_open", place))

    def death_part(self) -> None:
        """kill -9 of each side, and what a process that has mapped memory then sees."""
        part = self.unit // 4096 * 4096
        with self.sidecar() as sidecar:
            with Process(self) as one:
                one("publish", "state", 1, part)
            sidecar.resident("state", "engine")
            with Process(self) as importer, Process(self) as other:
                importer("attach", "state", 1, part)
                other("attach", "state", 1, part)
                truth = importer("checksum", "state")
                other.kill()
                self.row("after kill -9 of another engine", lambda: importer("checksum", "state") == truth)
                sidecar.kill()
                self.row("after kill -9 of the sidecar", lambda: importer("checksum", "state") == truth)
                with Process(self) as third:
                    self.row("attaching without a sidecar", lambda: third("attach", "state", 1, part))
                free = importer("memory")[0]
                sidecar.kill_holder()
                time.sleep(1.0)

                def seen() -> str:
                    now = importer("checksum", "state")
                    return "the same bytes" if now == truth else "other bytes" if now.lstrip("-").isdigit() else now

                self.row("after kill -9 of the holder: the importer sees", seen)
                self.row("after kill -9 of the holder: bytes that came free", lambda: importer("memory")[0] - free)
                with Process(self) as filler:
                    self.row("another process fills a gigabyte", lambda: filler("pinned_rate", part) > 0)
                    self.row("then the importer sees", seen)


class SidecarProcess:
    """`ballast serve --device cuda:0` of this tree."""

    def __init__(self, check: Check, checkpoints: tuple[Path, ...], way: str) -> None:
        from engine_shim.handoff.names import PoolPaths

        self.paths = PoolPaths(check.pool)
        self._log = tempfile.TemporaryFile()
        self._check = check
        empty = check.folder / "nothing"
        if not checkpoints and not empty.exists():
            check.write_checkpoint(empty, 64 * 512)
        served = checkpoints or (empty,)
        command = [sys.executable, "-m", "sidecar", "serve", *map(str, served), "--pool", check.pool, "--device", "cuda:0"]
        environ = {**check.environ, "BALLAST_UPLOAD": way}
        self.process = subprocess.Popen(command, env=environ, stdout=self._log, stderr=self._log, cwd=ROOT)

    @property
    def log(self) -> str:
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def resident(self, name: str, kind: str = "checkpoint") -> float:
        """Waits for the copy; its upload's bytes a second, as the holder has measured it."""
        from engine_shim.handoff import manifest
        from engine_shim.handoff.catalog import ControlPage
        from engine_shim.handoff.errors import HandoffError

        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the sidecar ended: {self.log[-300:]}")
            with contextlib.suppress(HandoffError):
                page = ControlPage.open(self.paths)
                try:
                    found = [g for g in page.read().of_model(name, "ready") if g.kind == kind]
                finally:
                    page.close()
                if found and manifest.read(self.paths.manifest(found[0].number)).devices:
                    size = sum(manifest.read(self.paths.manifest(found[0].number)).segments)
                    told = re.findall(rf"{name}, generation {found[0].number}, is in the memory of .*, ([\d.]+) s,", self.log)
                    return size / max(float(told[-1]), 0.005) if told else 0.0  # it is told in hundredths
            time.sleep(0.02)
        raise RuntimeError(f"no copy after 180 s: {self.log[-300:]}")

    def verify(self) -> str:
        command = [sys.executable, "-m", "sidecar", "verify", "--device", "--pool", self.paths.pool]
        done = subprocess.run(command, env=self._check.environ, capture_output=True, text=True, cwd=ROOT)
        return "intact" if done.returncode == 0 else (done.stdout + done.stderr)[-300:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def kill_holder(self) -> None:
        from engine_shim.handoff import holder

        for one in holder.alive(self.paths):
            os.kill(one.pid, signal.SIGKILL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        else:
            command = [sys.executable, "-m", "sidecar", "purge", "--force", "--pool", self.paths.pool]
            subprocess.run(command, env=self._check.environ, capture_output=True, cwd=ROOT)
        self._log.close()


def describe() -> dict[str, Any]:
    """The machine, as far as it says."""
    found: dict[str, Any] = {"cpus": os.cpu_count(), "python": sys.version.split()[0]}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    usage = os.statvfs("/dev/shm")
    found["shm"] = usage.f_bavail * usage.f_frsize
    return found


def table(rows: dict[str, Any]) -> str:
    width = max(map(len, rows))
    lines = []
    for what, value in rows.items():
        text = f"{value:.4g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, dict) else str(value)
        lines.append(f"{what.ljust(width)}  {text[:160]}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,10,60,100", help="of states, in GB (default 1,10,60,100)")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which no new row is begun (default 330)")
    parser.add_argument("--scratch", default="/dev/shm", help="where checkpoints are written: memory, by default")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gpu.json")
    parser.add_argument("--wheels", type=Path, help="install from these, into a folder that goes afterwards")
    parser.add_argument("--emulated", help="the emulated libcuda.so.1; sizes are then in MB")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.emulated)
        return 0
    options.packages = None
    if options.wheels is not None:
        options.packages = tempfile.mkdtemp(prefix="gpu-check-packages-")
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", options.packages]
        subprocess.run([*install, *map(str, sorted(options.wheels.glob("*.whl")))], check=True)
        sys.path.insert(0, options.packages)
    check = Check(options)
    try:
        check.everything()
    finally:
        shutil.rmtree(check.folder, ignore_errors=True)
        if options.packages:
            shutil.rmtree(options.packages, ignore_errors=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": describe(), "emulated": bool(check.emulated), "rows": check.rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(check.rows))
    failed = [what for what, value in check.rows.items() if value is False or str(value).startswith("failed")]
    if failed:
        print(f"gpu_check: {len(failed)} rows are not as they should be: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
