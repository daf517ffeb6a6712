"""What a deployment on many nodes costs and saves, by arithmetic: `python bench/nodes.py [--weights 700] …`.

Not a measurement. It multiplies what one node was measured to do, or what you put in, and says so: every number of the table
follows from the assumptions printed above it. docs/kubernetes.md, "More than one node", shows its output.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, fields

GB = 1e9
COUNTS = (8, 64, 512)


@dataclass(frozen=True)
class Assumptions:
    """Sizes in GB, rates in GB/s, times in seconds unless they say otherwise."""

    weights: float = 700.0  # one model: 671 billion parameters of one byte, and some
    group: int = 2  # nodes that one engine spans, by pipeline parallelism
    node_memory: float = 2000.0
    node_read: float = 5.0  # what one node reads from storage
    storage_read: float = 100.0  # what storage gives to all nodes together
    upload: float = 150.0  # host memory to all GPUs of a node
    attach: float = 1.0  # generously: by the measurements of docs/numbers.md it is milliseconds
    engine_start: float = 60.0  # imports, compiled graphs, warming up: the same with and without
    restarts: float = 30.0  # days from one restart of a node's engine to its next, whatever the cause


@dataclass(frozen=True)
class Row:
    """One size of deployment."""

    nodes: int
    per_node: float  # GB of weights that a node's sidecar holds
    cold_together: float  # s until all nodes have their weights, started at once
    disk_restart: float  # s for one group to load again from storage, alone
    memory_restart: float  # s for one group by attaching and uploading
    rollout_read: float  # TB read from storage when every engine is restarted, without Ballast; with it: none
    rollout_disk: float  # min of reading in that rollout, all groups at once
    between: float  # min from one restart to the next, somewhere in the deployment
    lost_disk: float  # group-hours a month spent loading, without and with
    lost_memory: float


def row(nodes: int, a: Assumptions) -> Row:
    groups = nodes // a.group
    per_node = a.weights / a.group
    together = max(per_node / a.node_read, groups * a.weights / a.storage_read)
    disk = max(per_node / a.node_read, a.weights / a.storage_read)
    memory = a.attach + per_node / a.upload
    a_month = nodes * 30 / a.restarts
    return Row(
        nodes, per_node, together, disk + memory - a.attach, memory, groups * a.weights / 1000, together / 60,
        a.restarts * 24 * 60 / nodes, a_month * (disk + memory - a.attach) / 3600, a_month * memory / 3600,
    )  # fmt: skip


def report(a: Assumptions) -> Iterator[str]:
    yield (
        f"Assumed: {a.weights:.0f} GB of weights; one engine on {a.group} nodes; a node reads {a.node_read:g} GB/s, storage "
        f"gives {a.storage_read:g} GB/s to all; {a.upload:g} GB/s from host memory to a node's GPUs; a node's engine restarts "
        f"every {a.restarts:g} days; {a.engine_start:.0f} s of an engine's start that weights have no part in are left out."
    )
    yield ""
    yield "| | " + " | ".join(f"{count} nodes" for count in COUNTS) + " |"
    yield "|---|" + "---:|" * len(COUNTS)
    rows = [row(count, a) for count in COUNTS]
    lines = (
        ("host memory that a node gives", lambda r: f"{r.per_node:.0f} GB ({100 * r.per_node / a.node_memory:.0f} %)"),
        ("host memory, all nodes", lambda r: f"{r.per_node * r.nodes / 1000:.1f} TB"),
        ("first load, all at once", lambda r: f"{r.cold_together:.0f} s"),
        ("one engine restarts, from storage", lambda r: f"{r.disk_restart:.0f} s"),
        ("one engine restarts, attached", lambda r: f"{r.memory_restart:.1f} s"),
        ("all engines restart: read from storage", lambda r: f"{r.rollout_read:.1f} TB, {r.rollout_disk:.0f} min"),
        ("all engines restart, attached", lambda r: f"0 TB, {r.memory_restart:.1f} s"),
        ("somewhere an engine restarts every", lambda r: f"{r.between / 60:.1f} h"),
        ("a month's loading, from storage", lambda r: f"{r.lost_disk:.1f} engine-hours"),
        ("a month's loading, attached", lambda r: f"{r.lost_memory:.2f} engine-hours"),
    )
    for title, cell in lines:
        yield f"| {title} | " + " | ".join(cell(one) for one in rows) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for part in fields(Assumptions):
        parser.add_argument(f"--{part.name.replace('_', '-')}", type=type(part.default), default=part.default)
    print("\n".join(report(Assumptions(**vars(parser.parse_args())))))


if __name__ == "__main__":
    main()
