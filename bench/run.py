"""Measures Ballast side by side with what it is compared with, and writes a report. See README.md.

    python bench/run.py                      # everything, on a checkpoint of 8 GB: an hour on an idle machine of two cores
    python bench/run.py --size 200MB         # a dry run
    python bench/run.py attach preload       # some sections
    python bench/run.py --show bench/results/NAME.json
    python bench/run.py --clean              # removes the checkpoints

Each section is a module beside this one; `child.py` holds what is measured in processes of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import attaching, checkpoints, engines, machine, preloading, processes, rivals, startup, vllm_start
from bench.measure import Ratio, Section, render, say

HERE = Path(__file__).resolve().parent
SECTIONS = ("attach", "tensors", "preload", "engines", "startup", "tmpfs", "loaders")
ASKED_FOR = ("vllm", "publishing")  # only by name: an engine in an environment of its own
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# Numbers of tensors, and bytes of each: many small ones, and one number of them at two sizes.
COUNTS = ((100, 1024), (1_000, 65_536), (1_000, 655_360), (10_000, 1024), (100_000, 1024))
HUGE = (1_000_000, 256)


def size(text: str) -> int:
    """Bytes, from `8GB`, `200MB`, `1GiB`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", text.strip().upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 8GB, 200MB or 1GiB")
    return int(float(found[1]) * UNITS[found[2] or ""])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures Ballast against what it is compared with.")
    every = f"any of {', '.join(SECTIONS)} (default: all of these), {', '.join(ASKED_FOR)}"
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=every)
    parser.add_argument("--size", type=size, default="8GB", help="of the large checkpoint, at least (default 8GB)")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement (default 5)")
    parser.add_argument("--starts", type=int, default=300, help="of an interpreter, each way (default 300)")
    parser.add_argument("--huge", action="store_true", help="also 1,000,000 tensors")
    parser.add_argument(
        "--cache", type=Path, default=HERE / ".cache", help="where checkpoints are made and kept; on a disk"
    )
    parser.add_argument("--name", help="of the result, bench/results/NAME.json (default: the size)")
    parser.add_argument("--clean", action="store_true", help="only remove the checkpoints")
    parser.add_argument("--show", type=Path, metavar="RESULT", help="print the report of an earlier run")
    given = parser.parse_args()
    unknown = set(given.sections) - {*SECTIONS, *ASKED_FOR}
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))} (there are {', '.join((*SECTIONS, *ASKED_FOR))})")
    if given.repeats < 1 or given.starts < 1:
        parser.error("measure at least once")
    return given


def main() -> None:
    given = arguments()
    if given.show:
        print(report(json.loads(given.show.read_text())))
        return
    if given.clean:
        shutil.rmtree(given.cache, ignore_errors=True)
        return
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: everything is cleaned up on the way out
    if machine.file_system(given.cache) in ("tmpfs", "ramfs"):
        raise SystemExit(f"{given.cache} is memory, and a disk is to be measured: give another --cache")
    name = given.name or f"{given.size / 1e9:g}GB"
    result: dict[str, Any] = {
        "machine": machine.describe(given.cache),
        "settings": {"size": given.size, "repeats": given.repeats, "starts": given.starts},
        "began": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "load average": {"before": machine.load_average()},
        "sections": {},
    }
    with processes.scratch() as scratch:
        for key, run in measurements(given, scratch).items():
            if key in (given.sections or SECTIONS):
                say(f"{key}:")
                result["sections"][key] = dataclasses.asdict(run())
                # Written after each section, so that an hour is not lost to a failure in the last one.
                result["load average"]["after"] = machine.load_average()
                save(result, HERE / "results" / f"{name}.json")
    print(report(result))


def measurements(given: argparse.Namespace, scratch: Path) -> dict[str, Callable[[], Section]]:
    """What each section runs. Checkpoints are made when a section needs them."""

    def large() -> checkpoints.Made:
        return checkpoints.llama(given.cache, given.size)

    def many(count: int, nbytes: int) -> checkpoints.Made:
        return checkpoints.many(given.cache, count, nbytes)

    counts = [*COUNTS, HUGE] if given.huge else COUNTS
    return {
        "attach": lambda: attaching.attach(large(), given.repeats),
        "tensors": lambda: attaching.tensors(counts, many, given.repeats),
        "preload": lambda: preloading.preload(large(), scratch, given.repeats),
        "engines": lambda: engines.engines(large()),
        "startup": lambda: startup.startup(given.starts),
        "tmpfs": lambda: rivals.tmpfs(large(), scratch, given.repeats),
        "loaders": lambda: rivals.loaders(large(), given.repeats),
        "vllm": lambda: vllm_start.vllm(given.cache, scratch, given.repeats),
        "publishing": lambda: vllm_start.publishing(given.cache, given.repeats),
    }


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def report(result: dict[str, Any]) -> str:
    """A result as Markdown."""
    described = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in described["versions"].items() if version)
    lines = [
        f"Measured {result['began']} on {described['cores']} cores of {described['cpu']}, {described['memory_gib']} GiB, Linux "
        f"{described['kernel']}, {described['system']}, checkpoints on {described['disk_file_system']}, /dev/shm with "
        f"{described['shm_huge_pages']}; Python {described['python']}, {versions}; commit {described['commit']}; load average "
        f"{result['load average']['before']:.1f} before and {result['load average'].get('after', 0):.1f} after. Ratios are "
        f"of medians of {result['settings']['repeats']} repetitions, with the least and greatest of the repetitions' own.",
        "",
    ]
    for section in result["sections"].values():
        lines.append(render(Section(**{**section, "ratios": [Ratio(**ratio) for ratio in section["ratios"]]})))
    return "\n".join(lines)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit("stopped")


if __name__ == "__main__":
    main()
