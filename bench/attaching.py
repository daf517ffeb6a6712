"""How long until an engine has its weights: from the pool, and as it would without Ballast.

Attaching maps bytes and touches none, so every way is also measured until every byte has been read, once and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench import machine, pagecache
from bench.checkpoints import Made
from bench.measure import Ratio, Row, Samples, Section, interleave, limit, rate, ratio, say, seconds
from bench.processes import files, measure, settle, sidecar

COLD = "load_file, cold disk"
WARM = "load_file, page cache warm"
OPEN = "engine_shim.open, every tensor"
HOOK = "load_file, shim on"
PRIVATE = "private memory, warm"
LOADED = {
    COLD: ["load"],
    WARM: ["load"],
    OPEN: ["open", "views"],
    HOOK: ["load"],
}  # the stages until tensors are usable
_MARGIN = 3 << 30  # bytes of memory that a measurement leaves to the rest of the machine
MOST_SECONDS = {100_000: 0.5, 1_000_000: 5.0}  # tensors → what attaching may take


def attach(made: Made, repeats: int) -> Section:
    """Every way to have the weights of one checkpoint, in turn, beside one pool that holds it."""
    names = files(made.files)
    section = Section(
        "Attaching",
        [
            f"A checkpoint of {made.nbytes / 1e9:.2f} GB in {made.tensors} tensors and {len(made.files)} files. A fresh "
            "process each time; its start and imports are not counted, and are in the last column. *Touching nothing*: every "
            "tensor is usable and no byte of it has been read. Median (least–greatest)."
        ],
        ["", "touching nothing", "and every byte read", "second read alone", "its rate", "start, imports"],
    )

    def cold() -> None:
        pagecache.evict(made.files)
        settle(made.nbytes)

    with sidecar(made.path) as served:
        share = _private_share(made.nbytes)
        if share < 1:
            section.notes.append(
                f"The private copy is of {share:.0%} of the bytes: memory holds no more beside the pool."
            )
        samples = interleave(
            [
                Row(COLD, lambda: measure("load_file", files=names), cold),
                Row(WARM, lambda: measure("load_file", files=names), lambda: pagecache.warm(made.files)),
                Row(OPEN, lambda: measure("attach", pool=served.pool)),
                Row(HOOK, lambda: measure("load_file", shim=served.pool, files=names)),
                Row(
                    PRIVATE,
                    lambda: measure("private", pool=served.pool, share=share),
                    cold,
                ),
            ],
            repeats,
        )
    for label, stages in LOADED.items():
        section.table.append(_row(samples, label, stages, made.nbytes))
    section.table.append(_row(samples, PRIVATE, [], int(samples.rows[PRIVATE][0]["bytes"])))
    section.ratios = _ratios(samples, made.nbytes)
    section.samples = samples.rows
    return section


def _private_share(nbytes: int) -> float:
    """How much of the weights can be had a second time, in private memory, beside what is there now."""
    room = machine.memory_available() - _MARGIN
    if room < nbytes // 8:
        raise SystemExit(
            f"{(room + _MARGIN) / 1e9:.1f} GB of free memory are too few beside a pool of {nbytes / 1e9:.1f} GB"
        )
    return min(1.0, room / nbytes)


def _row(samples: Samples, label: str, stages: Sequence[str], nbytes: int) -> list[str]:
    def shown(*names: str) -> str:
        return seconds(samples.values(label, *names)) if names else ""

    again = samples.values(label, "second")
    return [label, shown(*stages), shown(*stages, "first"), seconds(again), rate(nbytes, again), shown("start")]


def _ratios(samples: Samples, nbytes: int) -> list[Ratio]:
    def took(row: str, read: bool = True) -> list[float]:
        return samples.values(row, *LOADED[row], *(["first"] if read else []))

    def speed(row: str, *stages: str) -> list[float]:
        read = [sample.get("bytes", nbytes) for sample in samples.rows[row]]
        return [size / time for size, time in zip(read, samples.values(row, *stages), strict=True)]

    private = speed(PRIVATE, "first")
    return [
        ratio(f"({COLD}, every byte read) ÷ ({OPEN})", took(COLD), took(OPEN, read=False), at_least=780),
        ratio(f"({COLD}, every byte read) ÷ ({HOOK})", took(COLD), took(HOOK, read=False), at_least=780),
        ratio(f"{COLD} ÷ {OPEN}; every byte read on both sides", took(COLD), took(OPEN)),
        ratio(f"{WARM} ÷ {OPEN}; every byte read on both sides", took(WARM), took(OPEN)),
        ratio(f"{WARM} ÷ {OPEN}; touching nothing", took(WARM, read=False), took(OPEN, read=False)),
        ratio(f"{WARM} ÷ {HOOK}; touching nothing", took(WARM, read=False), took(HOOK, read=False)),
        ratio(
            "rate of attach and first read ÷ private memory", speed(OPEN, *LOADED[OPEN], "first"), private, at_least=0.8
        ),
        ratio("rate of the second read ÷ private memory", speed(OPEN, "second"), private),
    ]


def tensors(sizes: Sequence[tuple[int, int]], make: Callable[[int, int], Made], repeats: int) -> Section:
    """What attaching costs by number of tensors, each (count, bytes of each), against the bare floor."""
    section = Section(
        "Cost per tensor",
        [
            "*Floor*: mmap of every segment and one `torch.frombuffer` a tensor, put into a dictionary; all places are known "
            "beforehand. *Attach*: `engine_shim.open`, which finds the pool, reads and checks the manifest and takes a "
            "lease; then a dictionary of all tensors. *Open*: without it; a tensor is made when it is first asked for."
        ],
        ["tensors", "bytes", "open", "open and all tensors", "floor", "beyond the floor, per tensor"],
    )
    whole: dict[tuple[int, int], list[float]] = {}
    for count, nbytes in sizes:
        label = f"{count:,} tensors of {nbytes:,} bytes"
        say(label)
        made = make(count, nbytes)
        with sidecar(made.path) as served:
            samples = interleave(
                [
                    Row("attach", partial(measure, "attach", pool=served.pool, read=False)),
                    Row("floor", partial(measure, "floor", pool=served.pool)),
                ],
                repeats,
            )
        opened, floor = samples.values("attach", "open"), samples.values("floor", "open", "views")
        full = whole[count, nbytes] = samples.values("attach", "open", "views")
        beyond = samples.median("attach", "open", "views") - samples.median("floor", "open", "views")
        size = f"{made.nbytes / 1e6:,.1f} MB"
        each = f"{1e6 * beyond / count:.1f} µs"
        section.table.append([f"{count:,}", size, seconds(opened), seconds(full), seconds(floor), each])
        section.ratios.append(ratio(f"open and all tensors ÷ floor, {label}", full, floor, at_most=1.5))
        if count in MOST_SECONDS:
            section.ratios.append(limit(f"open, {label}", opened, MOST_SECONDS[count], "s"))
            section.ratios.append(limit(f"open and all tensors, {label}", full, MOST_SECONDS[count], "s"))
        section.samples |= {f"{label}: {row}": values for row, values in samples.rows.items()}
    section.ratios += [
        ratio(f"the same {count:,} tensors, {b // a} times the bytes", whole[count, b], whole[count, a])
        for count, a in sizes
        for other, b in sizes
        if other == count and b > a
    ]
    return section
