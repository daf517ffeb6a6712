"""How fast the sidecar fills the pool, against what the disk and the memory give; and what it needs besides the weights."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from bench import pagecache
from bench.checkpoints import Made
from bench.measure import Row, Sample, Samples, Section, interleave, limit, mib, rate, ratio, seconds
from bench.processes import files, measure, settle, sidecar

SEQUENTIAL = "dd, buffered"
DIRECT = "dd, O_DIRECT"
PARALLEL = "four readers, O_DIRECT"
COLD = "ballast serve, cold disk"
WARM = "ballast serve, page cache warm"
COPIES = {
    "touch": "memcpy into new shared memory",
    "allocate": "posix_fallocate, then memcpy",
    "write": "write(2) into new shared memory",
}
READERS = 4
ALLOWANCE = 64 << 20  # bytes that the sidecar may have beyond the weights, and one in a hundred of these


def preload(made: Made, scratch: Path, repeats: int) -> Section:
    names, nbytes = files(made.files), made.nbytes
    threads = len(os.sched_getaffinity(0))
    target = str(scratch / "copy")

    def evict() -> None:
        pagecache.evict(made.files)
        settle(nbytes)

    def warm() -> None:
        pagecache.warm(made.files)
        settle(nbytes)

    rows = [
        Row(SEQUENTIAL, lambda: _dd(made.files, direct=False), evict),
        Row(DIRECT, lambda: _dd(made.files, direct=True), partial(pagecache.evict, made.files)),
        Row(
            PARALLEL,
            lambda: measure("read_direct", files=names, threads=READERS),
            partial(pagecache.evict, made.files),
        ),
        Row(COLD, lambda: _serve(made), evict),
        *(
            Row(label, partial(measure, "memcpy", files=names, target=target, threads=threads, how=how), warm)
            for how, label in COPIES.items()
        ),
        Row(WARM, lambda: _serve(made), warm),
    ]
    samples = interleave(rows, repeats)
    section = Section(
        "Preloading",
        [
            f"{nbytes / 1e9:.2f} GB. *Loading*: from the moment the catalog announces the model until it says ready, digests "
            "of all tensors included; *with the process's start*: from the start of `ballast serve`. The copies are made by "
            f"{threads} threads out of the page cache, whose pages are mapped beforehand; making the new pages is part of it."
        ],
        ["", "loading", "rate", "with the process's start"],
    )
    stages = {SEQUENTIAL: "read", DIRECT: "read", PARALLEL: "read", COLD: "loading", WARM: "loading"}
    for row in rows:
        took = samples.values(row.label, stages.get(row.label, "copy"))
        process = seconds(samples.values(row.label, "process")) if "process" in samples.rows[row.label][0] else ""
        section.table.append([row.label, seconds(took), rate(nbytes, took), process])
    disk = _faster(samples, "read", [SEQUENTIAL, DIRECT])
    memory = _faster(samples, "copy", [COPIES["touch"], COPIES["allocate"]])
    # Rates, so that more is better: the other's time by ours.
    section.ratios = [
        ratio(
            "rate of loading, cold ÷ dd (the faster of the two)", disk, samples.values(COLD, "loading"), at_least=0.95
        ),
        ratio("the same with the process's start", disk, samples.values(COLD, "process")),
        ratio(
            "rate of loading, warm ÷ memcpy (the faster of the two)",
            memory,
            samples.values(WARM, "loading"),
            at_least=0.9,
        ),
        ratio(
            "rate of loading, warm ÷ write(2)", samples.values(COPIES["write"], "copy"), samples.values(WARM, "loading")
        ),
    ]
    served = samples.rows[COLD] + samples.rows[WARM]
    allowed = (ALLOWANCE + nbytes / 100) / (1 << 20)
    section.ratios += [
        limit("the sidecar's peak memory beside the weights", _each(served, "peak bytes", 1 << 20), allowed, "MiB"),
        limit(
            "of the checkpoint left in the page cache, cold",
            _each(samples.rows[COLD], "cached bytes", nbytes),
            0.01,
            "share",
        ),
        limit(
            "of the checkpoint left in the page cache, warm",
            _each(samples.rows[WARM], "cached bytes", nbytes),
            0.01,
            "share",
        ),
        limit("the pool's objects beyond the weights", _each(served, "surplus bytes", 1 << 20), allowed, "MiB"),
    ]
    section.facts = {"resident once ready": mib(statistics.median(_each(served, "resident bytes", 1)))}
    section.samples = samples.rows
    return section


def _dd(paths: Iterable[Path], direct: bool) -> Sample:
    began = time.perf_counter()
    for path in paths:
        command = ["dd", f"if={path}", "of=/dev/null", "bs=4M", "status=none", *(["iflag=direct"] if direct else [])]
        subprocess.run(command, check=True)
    return {"read": time.perf_counter() - began}


def _serve(made: Made) -> Sample:
    with sidecar(made.path) as served:
        return {
            "process": served.process,
            "loading": served.loading,
            "peak bytes": served.peak,
            "resident bytes": served.after.resident,
            "surplus bytes": served.objects - made.nbytes,
            "cached bytes": pagecache.resident(made.files),
        }


def _faster(samples: Samples, stage: str, labels: list[str]) -> list[float]:
    return min((samples.values(label, stage) for label in labels), key=statistics.median)


def _each(samples: Iterable[Sample], name: str, unit: float) -> list[float]:
    return [sample[name] / unit for sample in samples]
