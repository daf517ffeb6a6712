"""Other ways to have a checkpoint in memory quickly: a copy in a tmpfs, and loaders that read faster than safetensors."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bench import machine, pagecache
from bench.checkpoints import Made
from bench.measure import Ratio, Row, Section, interleave, rate, ratio, say, seconds
from bench.processes import environment, files, installed, measure, settle, sidecar

COPY = "load_file from a copy in tmpfs"
OPEN = "engine_shim.open, every tensor"
MARGIN = 3 << 30  # bytes of memory left to the rest of the machine
# Loaders that may be installed beside: name → module.
LOADERS = {"runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}


def tmpfs(made: Made, scratch: Path, repeats: int) -> Section:
    """The obvious rival. Only where memory holds the pool and the copy at once: measured one after the other, the
    machine's moods would decide."""
    copies = [scratch / path.name for path in made.files]
    section = Section(
        "Against a copy of the files in tmpfs",
        [
            f"{made.nbytes / 1e9:.2f} GB. Both map memory and touch nothing. The copy is not checked against the files, is not "
            "renewed when they change, and must be put there by hand after every boot; engines are to be pointed at it."
        ],
        ["", "touching nothing", "and every byte read", "second read alone", "its rate"],
    )
    free = shutil.disk_usage(scratch).free
    if min(free, machine.memory_available() - MARGIN) < 2 * made.nbytes:
        section.notes.append("Not measured here: memory does not hold the pool and the copy at once.")
        return section
    try:
        for path, copy in zip(made.files, copies, strict=True):
            pagecache.evict([path])
            shutil.copyfile(path, copy)
            pagecache.evict([path])
        with sidecar(made.path) as served:
            samples = interleave(
                [
                    Row(COPY, lambda: measure("load_file", files=files(copies))),
                    Row(OPEN, lambda: measure("attach", pool=served.pool)),
                ],
                repeats,
            )
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)
    stages = {COPY: ["load"], OPEN: ["open", "views"]}
    for label, names in stages.items():
        again = samples.values(label, "second")
        untouched, read = (seconds(samples.values(label, *stretch)) for stretch in (names, [*names, "first"]))
        section.table.append([label, untouched, read, seconds(again), rate(made.nbytes, again)])

    def compared(what: str, *more: str) -> Ratio:
        copy, ours = (samples.values(label, *stages[label], *more) for label in (COPY, OPEN))
        return ratio(f"{COPY} ÷ {OPEN}; {what}", copy, ours)

    section.ratios = [compared("touching nothing"), compared("every byte read", "first")]
    section.samples = samples.rows
    return section


def loaders(made: Made, repeats: int) -> Section:
    """Loaders that are installed here, every byte copied out, against the sidecar doing the same."""
    names = files(made.files)
    section = Section(
        "Against other loaders",
        [
            f"{made.nbytes / 1e9:.2f} GB; every byte read, from the disk and from a warm page cache. `ballast serve` does this "
            "once, the others do it at every start of an engine."
        ],
        ["", "cold", "rate", "warm", "rate"],
    )
    there = [loader for loader, module in LOADERS.items() if installed(module, environment())]
    missing = sorted(LOADERS.keys() - set(there))
    if missing:
        section.notes.append(f"Not installed here, so not measured: {', '.join(missing)}.")
        say(f"  not installed: {', '.join(missing)}")
    ways: dict[str, tuple[Callable[[], dict[str, float]], Sequence[str]]] = {
        "load_file": (partial(measure, "load_file", files=names), ["load", "first"]),
        **{loader: (partial(measure, loader, files=names), ["load"]) for loader in there},
        "ballast serve": (lambda: _serve(made), ["loading"]),
    }

    def prepare(state: str) -> None:
        (pagecache.evict if state == "cold" else pagecache.warm)(made.files)
        settle(made.nbytes)

    states = ("cold", "warm")
    rows = [Row(f"{way}, {state}", run, partial(prepare, state)) for way, (run, _) in ways.items() for state in states]
    samples = interleave(rows, repeats)
    took = {
        (way, state): samples.values(f"{way}, {state}", *stages)
        for way, (_, stages) in ways.items()
        for state in states
    }
    for way in ways:
        cells = [cell for state in states for cell in (seconds(took[way, state]), rate(made.nbytes, took[way, state]))]
        section.table.append([way, *cells])
    section.ratios = [
        ratio(
            f"rate of ballast serve ÷ {way}, {state}",
            took[way, state],
            took["ballast serve", state],
            # load_file only maps a warm page cache, and copies nothing.
            at_least=None if (way, state) == ("load_file", "warm") else 1.0,
        )
        for way in [*there, "load_file"]
        for state in states
    ]
    section.samples = samples.rows
    return section


def _serve(made: Made) -> dict[str, float]:
    with sidecar(made.path) as served:
        return {"loading": served.loading}
