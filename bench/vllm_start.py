"""A real vLLM's weight stage: attached, against the disk, the page cache and a copy in tmpfs; and what publishing costs.

vLLM runs in an environment of its own, whose interpreter BALLAST_TEST_VLLM_PYTHON names (`make test-vllm` makes one).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bench import pagecache
from bench.measure import Row, Samples, Section, interleave, mib, ratio, say, seconds
from bench.processes import MODEL, ROOT, SITE, Served, fill_page_cache, sidecar
from bench.vllm_engine import TOKENS
from engine_shim.handoff import catalog
from engine_shim.handoff.catalog import ControlPage

PROGRAM = Path(__file__).with_name("vllm_engine.py")
SIZE = 4_400_000_000
ENGINES = 3
_TIMEOUT = 600.0


def interpreter() -> str:
    found = os.environ.get("BALLAST_TEST_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(found).exists():
        raise SystemExit(f"{found} is not there: run 'make test-vllm', or name an interpreter in BALLAST_TEST_VLLM_PYTHON")
    return found


def environment(pool: str | None, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("BALLAST_", "PYTHON", "VLLM_"))}
    clean |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_CI_ENV": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join((str(SITE), str(ROOT))), "BENCH_LAUNCHED": str(time.monotonic()),
    }  # fmt: skip
    if pool:
        clean |= {"BALLAST_POOL": pool, "BALLAST_MODE": "require", "BALLAST_LOG": "INFO"}
    return clean | more


@contextmanager
def _engine(folder: Path, pool: str | None, hang: bool, **more: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A started engine and what it told. It stays until the end of the block if it is to `hang`."""
    process = subprocess.Popen(
        [interpreter(), str(PROGRAM), "start", str(folder), *(["hang"] if hang else [])], env=environment(pool, **more),
        cwd="/", text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    log: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            if line.startswith("MEASURED "):
                yield process, {**json.loads(line[len("MEASURED ") :]), "log": "".join(log)}
                return
        raise SystemExit(f"vLLM ended before it answered: {''.join(log)[-4000:]}")
    finally:
        rest: IO[str] | None = process.stdin
        if rest is not None:
            rest.close()
        try:
            process.wait(_TIMEOUT if not hang else 30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(folder: Path, pool: str | None = None, **more: str) -> dict[str, Any]:
    with _engine(folder, pool, hang=False, **more) as (_, told):
        pass
    return told


def _checkpoint(cache: Path) -> Path:
    folder = cache.absolute() / f"vllm-{SIZE}"
    if not (folder / "tokenizer.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        building = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(building, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        command = [interpreter(), str(PROGRAM), "make", str(building), str(SIZE)]
        subprocess.run(command, env=environment(None), cwd="/", check=True)
        building.rename(folder)
    return folder


ATTACHED = "comes from memory as it was after loading"


ZERO_COPY = {"BALLAST_VLLM_ZERO_COPY": "1"}
NAMED = {"BALLAST_MODEL": MODEL}
COLUMNS = ["start", "weight stage", "to the first token"]


class _Answers:
    """What an engine was measured to take, given that it did what was expected and answered as those before it."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def __call__(self, kernels: str, told: dict[str, Any], attached: bool | None = None) -> dict[str, float]:
        if attached is not None and (ATTACHED in told["log"]) != attached:
            raise SystemExit(f"this start was to {'attach' if attached else 'load'}: {told['log'][-3000:]}")
        if self._tokens.setdefault(kernels, told["tokens"]) != told["tokens"]:
            raise SystemExit(f"other tokens than from disk: {told['tokens']} instead of {self._tokens[kernels]}")
        return {name: told[name] for name in ("stage", "first token")}


def _tabulate(section: Section, samples: Samples) -> None:
    for label, found in samples.rows.items():
        stage = seconds(samples.values(label, "stage")) if "stage" in found[0] else "not told"
        section.table.append([label, stage, seconds(samples.values(label, "first token"))])
        section.samples[label] = samples.rows[label]


def vllm(cache: Path, scratch: Path, repeats: int) -> Section:
    folder = _checkpoint(cache)
    files = sorted(folder.glob("*.safetensors"))
    nbytes = sum(file.stat().st_size for file in files)
    copy = scratch / "vllm"
    section = Section(
        "A real vLLM's start",
        [
            f"vLLM on the CPU, one process, a Llama of {nbytes / 1e9:.2f} GB in bfloat16. *Weight stage*: all that is done "
            "about weights: reading or attaching, post-processing (which packs Linear weights into private copies unless they "
            "are used where they lie), and what Ballast does around them; not the building of the model, nor vLLM's two full "
            "garbage collections, which every start has. *First token*: from the start of the process, most of "
            "which is imports. All starts give the same tokens as the same kernels from disk."
        ],
        COLUMNS,
    )
    measured = _Answers()
    with sidecar(folder) as served, ExitStack() as stack:
        shutil.copytree(folder, copy)
        stack.callback(shutil.rmtree, copy, ignore_errors=True)
        pool = served.pool
        _start(folder, pool, **NAMED)
        _adopted(served)
        rows = [
            Row("disk, cold", lambda: measured("packed", _start(folder)), lambda: pagecache.evict(files)),
            Row("disk, warm", lambda: measured("packed", _start(folder)), lambda: pagecache.warm(files)),
            Row("a copy in tmpfs", lambda: measured("packed", _start(copy))),
            Row("attached, packing", lambda: measured("packed", _start(folder, pool, **NAMED), True)),
            Row("attached, zero-copy", lambda: measured("plain", _start(folder, pool, **NAMED, **ZERO_COPY), True)),
        ]
        samples = interleave(rows, repeats)
        shutil.rmtree(copy)
        section.facts = _memory(folder, served, {**NAMED, **ZERO_COPY})
    _tabulate(section, samples)
    fast, packed = samples.values("attached, zero-copy", "stage"), samples.values("attached, packing", "stage")
    for label, target in (("disk, cold", 100), ("disk, warm", 10), ("a copy in tmpfs", None)):
        slow = samples.values(label, "stage")
        section.ratios.append(ratio(f"weight stage: {label} / attached, zero-copy", slow, fast, target))
        section.ratios.append(ratio(f"weight stage: {label} / attached, packing", slow, packed))
    for label, value in section.facts.items():
        section.notes.append(f"{label}: {value}.")
    return section


def publishing(cache: Path, repeats: int) -> Section:
    folder = _checkpoint(cache)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    section = Section(
        "What publishing costs a real vLLM's first start",
        [
            f"The same engine and checkpoint ({nbytes / 1e9:.2f} GB), each start with a sidecar of its own that just loaded "
            "it, and with little memory free but for what is in the page cache. *Server*: `vllm serve`, until it has answered "
            "a request. *Bare*: a script with vLLM's `LLM` class, all in one process, until its first token."
        ],
        COLUMNS,
    )
    answers: set[str] = set()
    measured = _Answers()

    def server(**more: str) -> dict[str, float]:
        with sidecar(folder) as fresh:  # what an earlier start has published would be attached to
            took, answer = _serve(folder, fresh.pool, **NAMED, **more)
            if not more:
                _adopted(fresh)
        answers.add(answer)
        if len(answers) > 1:
            raise SystemExit(f"the servers answer otherwise: {answers}")
        return {"first token": took}

    def bare(**more: str) -> dict[str, float]:
        with sidecar(folder) as fresh:
            return measured("packed", _start(folder, fresh.pool, **NAMED, **more), False)

    def full() -> None:
        fill_page_cache(cache)

    off = {"BALLAST_PUBLISH": "0"}
    rows = [
        Row("server, not publishing", lambda: server(**off), full),
        Row("server, publishing", server, full),
        Row("bare, not publishing", lambda: bare(**off), full),
        Row("bare, publishing", bare, full),
    ]
    samples = interleave(rows, repeats)
    _tabulate(section, samples)
    for kind, target in (("server", 1.05), ("bare", None)):
        with_, without = (samples.values(f"{kind}, {what}", "first token") for what in ("publishing", "not publishing"))
        section.ratios.append(ratio(f"first token, {kind}: publishing / not publishing", with_, without, at_most=target))
    return section


def _serve(folder: Path, pool: str, **more: str) -> tuple[float, str]:
    """Starts `vllm serve` and asks until it answers: seconds since its start, and the answer. Ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(interpreter()).with_name("vllm")), "serve", str(folder), "--port", str(port), "--dtype", "bfloat16",
        "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "1",
    ]  # fmt: skip
    more["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=environment(pool, **more), cwd="/", stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (answer := _ask(port, str(folder))) is None:
                if process.poll() is not None or time.monotonic() - began > _TIMEOUT:
                    log.seek(0)
                    raise SystemExit(f"vLLM's server does not answer: {log.read()[-4000:]}")
                time.sleep(0.02)
            return time.monotonic() - began, answer
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ask(port: int, model: str) -> str | None:
    """The server's first word; None as long as nobody listens."""
    asked = json.dumps({"model": model, "prompt": TOKENS, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", asked, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"vLLM's server refuses: {error.read().decode(errors='replace')[:2000]}") from None
    except (urllib.error.URLError, ConnectionError):
        return None


def _states(served: Served) -> list[catalog.Generation]:
    page = ControlPage.open(served.paths)
    try:
        found = page.read().generations
    finally:
        page.close()
    return [generation for generation in found if generation.kind == catalog.ENGINE]


def _adopted(served: Served) -> None:
    deadline = time.monotonic() + 120
    while not any(generation.state == catalog.READY for generation in _states(served)):
        if time.monotonic() > deadline:
            raise SystemExit("the sidecar did not adopt the engine's state")
        time.sleep(0.2)


def _memory(folder: Path, served: Served, more: dict[str, str]) -> dict[str, Any]:
    """What several engines at once have of the shared bytes, from /proc/PID/smaps."""
    with ExitStack() as stack:
        found = [stack.enter_context(_engine(folder, served.pool, True, **more))[0].pid for _ in range(ENGINES)]
        maps = [_shared_maps(pid) for pid in found]
    say(f"  {ENGINES} engines: {maps}")
    rows = ", ".join(f"{mib(row['Rss'])} resident ({mib(row['Pss'])} its share, {mib(row['Private'])} private)" for row in maps)
    together = sum(row["Pss"] for row in maps)
    return {f"Maps of the pool in {ENGINES} engines at once (zero-copy)": f"{rows}; together {mib(together)} of memory"}


def _shared_maps(pid: int) -> dict[str, int]:
    total = {"Rss": 0, "Pss": 0, "Private": 0}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            inside = len(words) > 5 and "/ballast-" in words[5]
        elif inside and words[0] in ("Rss:", "Pss:", "Private_Dirty:"):
            total[words[0].rstrip(":").split("_")[0]] += int(words[1]) * 1024
    return total
