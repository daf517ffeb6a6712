"""How measuring is done: rows in turn, repeated, each repetition in another order; medians, spreads, and ratios of them.

Machines are noisy and drift. Rows that are compared are therefore run in turn within each repetition, never one after the
other as blocks, and a ratio is quoted with what it was in each repetition.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Sample = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One thing to measure: `prepare` is not timed, `run` gives numbers by name (seconds, unless the name says bytes)."""

    label: str
    run: Callable[[], Sample]
    prepare: Callable[[], None] = lambda: None


@dataclass
class Samples:
    """What the rows gave, in every repetition."""

    rows: dict[str, list[Sample]]

    def values(self, row: str, *names: str) -> list[float]:
        """The sum of the named numbers of a row, per repetition."""
        return [sum(sample[name] for name in names) for sample in self.rows[row]]

    def median(self, row: str, *names: str) -> float:
        return statistics.median(self.values(row, *names))


@dataclass(frozen=True)
class Ratio:
    """Two measurements compared: the ratio of the medians, and the least and greatest of the repetitions' own."""

    label: str
    value: float
    low: float
    high: float
    target: str = ""
    met: bool | None = None


@dataclass
class Section:
    """A part of the report: a table of what was measured, and one of ratios."""

    title: str
    notes: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)


def interleave(rows: Sequence[Row], repeats: int, quiet: bool = False) -> Samples:
    """Runs every row `repeats` times, beginning each repetition with another row; says so, unless `quiet`."""
    collected: dict[str, list[Sample]] = {row.label: [] for row in rows}
    for repetition in range(repeats):
        shift = repetition % len(rows)
        for row in [*rows[shift:], *rows[:shift]]:
            row.prepare()
            began = time.monotonic()
            collected[row.label].append(row.run())
            if not quiet:
                say(f"  {repetition + 1}/{repeats} {row.label}: {time.monotonic() - began:.1f} s")
    return Samples(collected)


def ratio(
    label: str,
    above: Sequence[float],
    below: Sequence[float],
    at_least: float | None = None,
    at_most: float | None = None,
) -> Ratio:
    """`above` by `below`, both measured in the same repetitions."""
    value = statistics.median(above) / statistics.median(below)
    each = [a / b for a, b in zip(above, below, strict=True)]
    if at_least is not None:
        return Ratio(label, value, min(each), max(each), f"≥ {at_least:g}", value >= at_least)
    if at_most is not None:
        return Ratio(label, value, min(each), max(each), f"≤ {at_most:g}", value <= at_most)
    return Ratio(label, value, min(each), max(each))


def limit(label: str, values: Sequence[float], at_most: float, unit: str) -> Ratio:
    """A plain number with an upper limit, in the same table as the ratios."""
    value = statistics.median(values)
    return Ratio(f"{label} ({unit})", value, min(values), max(values), f"≤ {at_most:g}", value <= at_most)


def seconds(values: Sequence[float]) -> str:
    """A median with its spread, in a unit that suits it."""
    unit, scale = ("s", 1.0) if max(values) >= 1 else ("ms", 1e3)
    low, middle, high = (f"{scale * f(values):.3g}" for f in (min, statistics.median, max))
    return f"{middle} {unit} ({low}–{high})"


def rate(nbytes: int, values: Sequence[float]) -> str:
    return f"{nbytes / statistics.median(values) / 1e9:.2f} GB/s"


def mib(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"


def say(line: str) -> None:
    """Progress, beside the report: to stderr."""
    print(line, file=sys.stderr, flush=True)


def render(section: Section) -> str:
    """A section as Markdown."""
    lines = [f"## {section.title}", ""]
    for note in section.notes:
        lines += [note, ""]
    if section.table:
        lines += [*_table(section.columns, section.table), ""]
    if section.ratios:
        rows = []
        for r in section.ratios:
            verdict = "" if r.met is None else "met" if r.met else "missed"
            rows.append([r.label, _number(r.value), f"{_number(r.low)}–{_number(r.high)}", r.target, verdict])
        lines += [*_table(["compared", "ratio", "each time", "target", ""], rows), ""]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [columns, *rows]]
    ruler = ["-" * width for width in widths]
    return [f"| {' | '.join(row)} |" for row in [lines[0], ruler, *lines[1:]]]
