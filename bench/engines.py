"""What a second and a third engine on the same weights cost in memory."""

from __future__ import annotations

from contextlib import ExitStack

from bench.checkpoints import Made
from bench.measure import Section, limit, mib, say
from bench.processes import Memory, engine, memory_of, sidecar

COUNT = 3


def engines(made: Made) -> Section:
    """Processes attached at once, each of which has read every byte, against ones with the same imports and no weights."""
    section = Section(
        "Memory of more engines",
        [
            f"{COUNT} processes attached at once to {made.nbytes / 1e9:.2f} GB, each of which has read every byte, beside two "
            "that only have the same imports. *All together*: PSS of all of them, so each shared page once. *More*: what "
            "this engine added to that; *for its weights*: less what a process without weights adds, but with the kernel's "
            "page tables, which PSS does not count."
        ],
        ["engines", "all together", "more", "for its weights", "of that, page tables", "by weights"],
    )
    with sidecar(made.path) as served, ExitStack() as stack:
        pids = [stack.enter_context(engine(None))]
        alone = _together(pids)
        pids.append(stack.enter_context(engine(None)))
        before = _together(pids)
        bare, bare_tables = before - alone, memory_of(pids[-1]).page_tables
        for number in range(1, COUNT + 1):
            pids.append(stack.enter_context(engine(served.pool)))
            total, newest = _together(pids), memory_of(pids[-1])
            tables = newest.page_tables - bare_tables
            extra = total - before - bare + tables
            share = extra / made.nbytes
            section.table.append(
                [str(number), mib(total), mib(total - before), mib(extra), mib(tables), f"{100 * share:.2f} %"]
            )
            section.samples[f"{number} engines"] = [_sample(memory_of(pid)) for pid in pids]
            if number > 1:
                label = f"memory of engine {number} for its weights"
                section.ratios.append(limit(label, [100 * share], 1.0, "% of the weights"))
            say(f"  {number} engines: {mib(extra)} more")
            before = total
        section.facts = {"a process with the imports alone adds": mib(bare)}
    return section


def _together(pids: list[int]) -> int:
    return sum(memory_of(pid).proportional for pid in pids)


def _sample(memory: Memory) -> dict[str, float]:
    return {
        "resident bytes": memory.resident,
        "PSS bytes": memory.proportional,
        "private bytes": memory.private,
        "page table bytes": memory.page_tables,
    }
