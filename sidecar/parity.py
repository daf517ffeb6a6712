"""`ballast parity`: the same engine command by way of every rung, compared tensor by tensor and token by token.

The command is run as many times as there are rungs: from disk, from the pool's checkpoint, the start that publishes the
engine's state, and one that attaches to it. Each engine writes down its whole module tree (`engine_shim.parity`), once after
its weights were loaded and once after post-processing; a server is asked for greedy tokens as well. The disk is right.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from engine_shim.handoff.catalog import CHECKPOINT, ENGINE, READY, ControlPage, Generation
from engine_shim.handoff.errors import HandoffError, NotFound, NotReady
from engine_shim.handoff.names import DEFAULT_DIR, PoolPaths

OWN = "loaded by "  # how a rung begins that was the engine's own reading: engine_shim.parity
SITE = Path(__file__).resolve().parent.parent / "engine_shim" / "hooks" / "site"
PROMPTS = ("The capital of France is", "One, two, three,", "The sea was calm and")
_FEW = 5  # differences that are told of; the rest is counted


@dataclass(frozen=True)
class Rung:
    """One way for weights to come into the engine: what the environment says, and whether state must have been bound."""

    name: str
    environ: Mapping[str, str]
    attached: bool = False


RUNGS = (
    Rung("disk", {"BALLAST_STATE": "0", "BALLAST_PUBLISH": "0", "BALLAST_WAIT": "0"}),
    Rung("checkpoint", {"BALLAST_STATE": "0", "BALLAST_PUBLISH": "0"}),
    Rung("publishing", {}),
    Rung("attached", {}, attached=True),
)


@dataclass
class Outcome:
    """What one run told: stage of each rank -> its dump; prompt -> tokens; how long until the first answer."""

    dumps: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rungs(self) -> list[str]:
        return sorted({dump["rung"] for dump in self.dumps.values()})

    @property
    def loaded_itself(self) -> bool:
        """Whether the engine read the weights of any rank itself, from disk or from the pool's checkpoint."""
        return any(rung.startswith(OWN) for rung in self.rungs)


@dataclass(frozen=True)
class Verdict:
    """What a rung has in common with the disk. Equal if there are no differences."""

    rung: str
    how: str
    tensors: int
    answers: int
    seconds: float
    differences: list[str]


def compare(disk: Outcome, other: Outcome) -> list[str]:
    """Every difference between two runs, the first of each tensor told."""
    found = []
    for stage in sorted({*disk.dumps, *other.dumps}):
        if stage not in disk.dumps or stage not in other.dumps:
            found.append(f"{stage}: only one of the two runs has it")
            continue
        found += [f"{stage}: {line}" for line in compare_trees(disk.dumps[stage], other.dumps[stage])]
    for number, (one, another) in enumerate(zip(disk.answers, other.answers, strict=False)):
        if one != another:
            found.append(f"answer {number} is {another!r:.300} and from disk {one!r:.300}")
    if len(disk.answers) != len(other.answers):
        found.append(f"{len(other.answers)} answers, and from disk {len(disk.answers)}")
    return found


_COLUMNS = ("name", "kind", "class", "dtype", "shape", "strides", "offset", "alias group", "bytes", "attributes")


def compare_trees(disk: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Differences between two dumps of one stage. Offsets within a storage count, addresses do not."""
    found = []
    ours = {row[0]: row for row in other["tensors"]}
    for row in disk["tensors"]:
        there = ours.pop(row[0], None)
        if there is None:
            found.append(f"{row[0]} is missing")
            continue
        unlike = [
            f"{column} {b!r:.80} instead of {a!r:.80}" for column, a, b in zip(_COLUMNS, row, there, strict=True) if a != b
        ]
        if unlike:
            found.append(f"{row[0]}: {'; '.join(unlike)}")
    found += [f"{name} is there, and is not from disk" for name in ours]
    a, b = disk["attributes"], other["attributes"]
    found += [
        f"attribute {name} is {b.get(name)!r:.80} instead of {a.get(name)!r:.80}"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]
    return found


def read_dumps(folder: Path) -> dict[str, dict[str, Any]]:
    """What the engine's ranks have written: `<role>-<rank>-<stage>` -> dump."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


class Engine:
    """An engine's command as a child with everything that it starts, stopped as a whole at the end of the block."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: IO[Any] | int) -> None:
        self.process = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        for number, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)  # of the session that we made, so the number is ours
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what a server leaves behind when it is stopped


def engine_environment(pool: str, directory: Path, **more: str) -> dict[str, str]:
    """This process's environment with the shim on, as `ballast run` makes it."""
    environ = {key: value for key, value in os.environ.items() if key != "BALLAST_MODE"}
    environ.update(BALLAST_POOL=pool, BALLAST_MODE="auto")
    if directory != Path(DEFAULT_DIR) or "BALLAST_DIR" in environ:
        environ["BALLAST_DIR"] = str(directory)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), environ.get("PYTHONPATH"))))
    environ.update(more)
    return environ


def is_server(command: Sequence[str]) -> bool:
    """Whether the command is a server that can be asked over HTTP, and does not end by itself."""
    return "serve" in command or any("api_server" in word or "launch_server" in word for word in command)


def model_of(command: Sequence[str]) -> str | None:
    """The checkpoint that a command names: after `serve`, or with `--model` or `--model-path`."""
    words = list(command)
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in ("--model", "--model-path", "-m") and name != "-m":
            return value or (words[index + 1] if index + 1 < len(words) else None)
        if word == "serve" and index + 1 < len(words) and not words[index + 1].startswith("-"):
            return words[index + 1]
    return None


def _with_port(command: Sequence[str]) -> tuple[list[str], int]:
    words = list(command)
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name == "--port":
            return words, int(value or words[index + 1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    return [*words, "--port", str(port)], port


def run(
    command: Sequence[str], environ: Mapping[str, str], log: IO[Any] | int, tokens: int, timeout: float
) -> Outcome:
    """Runs the command once, with dumps on. Raises NotReady if it ends or does not answer in time."""
    outcome = Outcome()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ballast-parity-") as folder:
        full = {**environ, "BALLAST_PARITY": folder}
        if is_server(command):
            command, port = _with_port(command)
            with Engine(command, full, log) as engine:
                base = f"http://127.0.0.1:{port}"
                _until_healthy(base, engine, timeout)
                outcome.answers = ask(base, tokens)
                outcome.seconds = time.monotonic() - began
        else:
            with Engine(command, full, log) as engine:
                try:
                    code = engine.process.wait(timeout)
                except subprocess.TimeoutExpired:
                    raise NotReady(f"the engine did not end in {timeout:.0f} s: raise --timeout") from None
                if code:
                    raise NotReady(f"the engine ended with {code}: its output is above")
                outcome.seconds = time.monotonic() - began
        outcome.dumps = read_dumps(Path(folder))
    return outcome


def _until_healthy(base: str, engine: Engine, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        if engine.process.poll() is not None:
            raise NotReady(f"the engine ended with {engine.process.returncode} before it answered: its output is above")
        if time.monotonic() > deadline:
            raise NotReady(f"the engine did not answer in {timeout:.0f} s: raise --timeout")
        time.sleep(0.2)


def ask(base: str, tokens: int) -> list[Any]:
    """Greedy tokens for each prompt, with their log probabilities; embeddings from a server that does not generate."""
    with urllib.request.urlopen(f"{base}/v1/models", timeout=30) as reply:
        model = json.load(reply)["data"][0]["id"]
    answers = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1}
        try:
            choice = _post(f"{base}/v1/completions", body)["choices"][0]
            told = choice.get("logprobs") or {}
            # Kernels may round the last bits otherwise where memory is aligned otherwise; more than that is a difference.
            probabilities = [None if value is None else round(value, 3) for value in told.get("token_logprobs") or ()]
            answers.append([choice["text"], told.get("tokens"), probabilities])
        except urllib.error.HTTPError as error:
            if error.code not in (400, 404, 405):
                raise
            answers.append(_post(f"{base}/v1/embeddings", {"model": model, "input": prompt})["data"][0]["embedding"])
    return answers


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


@contextlib.contextmanager
def sidecar(checkpoint: Path, directory: Path, log: IO[Any] | int, timeout: float) -> Iterator[str]:
    """A pool of its own with this checkpoint in it, gone at the end."""
    pool = f"parity-{secrets.token_hex(4)}"
    command = [sys.executable, "-m", "sidecar", "serve", str(checkpoint), "--pool", pool, "--dir", str(directory)]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST_")}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).resolve().parent.parent), environ.get("PYTHONPATH")))
    )
    process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(PoolPaths(pool, directory), lambda g: g.kind == CHECKPOINT, timeout, process)
        yield pool
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def until(
    paths: PoolPaths,
    fits: Callable[[Generation], bool],
    timeout: float,
    process: subprocess.Popen[Any] | None = None,
) -> None:
    """Waits until the pool has a ready generation that fits. Raises NotReady."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(HandoffError):
            page = ControlPage.open(paths)
            try:
                if any(g.state == READY and fits(g) for g in page.read().generations):
                    return
            finally:
                page.close()
        if process is not None and process.poll() is not None:
            raise NotReady(f"the sidecar ended with {process.returncode}: its output is above")
        if time.monotonic() > deadline:
            raise NotReady(f"pool {paths.pool!r} does not have it after {timeout:.0f} s: see 'ballast status'")
        time.sleep(0.1)


def parity(
    command: Sequence[str],
    *,
    pool: str | None = None,
    directory: Path = Path(DEFAULT_DIR),
    tokens: int = 32,
    timeout: float = 900.0,
    log: IO[Any] | int = subprocess.DEVNULL,
    tell: Callable[[Verdict], None] = lambda _: None,
) -> list[Verdict]:
    """Runs `command` by every rung and compares each with the disk. `tell` hears of each verdict as soon as it is there.

    Uses `pool` where it is given, which must hold the command's checkpoint; otherwise a sidecar of its own. Raises NotFound
    if the command names no checkpoint on disk, NotReady if an engine does not start.
    """
    with contextlib.ExitStack() as stack:
        if pool is None:
            model = model_of(command)
            if model is None or not Path(model).exists():
                raise NotFound(
                    "the command names no checkpoint on this disk: start a sidecar with it, and name its pool with --pool"
                )
            pool = stack.enter_context(sidecar(Path(model), directory, log, timeout))
        verdicts: list[Verdict] = []
        disk: Outcome | None = None
        for rung in RUNGS:
            before = _states(PoolPaths(pool, directory))
            chosen = pool if rung.name != "disk" else f"none-{secrets.token_hex(4)}"
            outcome = run(command, engine_environment(chosen, directory, **rung.environ), log, tokens, timeout)
            if disk is None:
                disk = outcome
                if not disk.dumps:
                    raise NotFound("the engine's shim wrote nothing: is this a command of an engine that Ballast knows?")
            if rung.name == "publishing" and outcome.loaded_itself:
                with contextlib.suppress(NotReady):  # then the next rung says that nothing was attached
                    until(PoolPaths(pool, directory), functools.partial(_is_new, before), 60.0)
            differences = compare(disk, outcome)
            if rung.attached and outcome.loaded_itself:
                differences.insert(0, "the engine loaded its weights itself: nothing was attached")
            count = sum(len(dump["tensors"]) for dump in outcome.dumps.values())
            how = ", ".join(outcome.rungs)
            verdicts.append(Verdict(rung.name, how, count, len(outcome.answers), outcome.seconds, differences))
            tell(verdicts[-1])
    return verdicts


def _states(paths: PoolPaths) -> set[int]:
    page = ControlPage.open(paths)
    try:
        return {generation.number for generation in page.read().generations if generation.kind == ENGINE}
    finally:
        page.close()


def _is_new(before: set[int], generation: Generation) -> bool:
    return generation.kind == ENGINE and generation.number not in before


def sentence(verdict: Verdict) -> str:
    """A verdict as a person reads it."""
    if not verdict.differences:
        what = f"{verdict.tensors} tensors" + (f" and {verdict.answers} answers" if verdict.answers else "")
        same = "the reference" if verdict.rung == "disk" else f"{what} equal"
        return f"{verdict.rung:<11} {same} ({verdict.how}; {verdict.seconds:.1f} s)"
    shown = "".join(f"\n    {line}" for line in verdict.differences[:_FEW])
    more = len(verdict.differences) - _FEW
    return f"{verdict.rung:<11} {len(verdict.differences)} differences:{shown}" + (f"\n    and {more} more" if more > 0 else "")
