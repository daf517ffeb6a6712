"""`ballast prepare`: an engine's command run once, only until every rank has published its state, so that all serving starts
attach. For an init step, or in the sidecar's own container where that has the engine in it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine_shim.handoff.errors import NotReady
from engine_shim.handoff.names import DEFAULT_DIR
from sidecar.parity import Engine, engine_environment

_TURN = 0.1


@dataclass(frozen=True)
class Prepared:
    """What became of one rank's state: `published`, or `attached` where the pool had it already."""

    model: str
    role: str
    rank: int
    outcome: str
    generation: int | None


def prepare(
    command: Sequence[str],
    pool: str,
    *,
    directory: Path = Path(DEFAULT_DIR),
    timeout: float = 1800.0,
    log: IO[Any] | int | None = None,
) -> list[Prepared]:
    """Runs `command` until every rank of every model that it loads has its state in the pool, then stops it.

    Raises NotReady if the engine ends before, a rank could not publish, or `timeout` seconds are over.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="ballast-prepare-") as folder:
        environ = engine_environment(pool, directory, BALLAST_PREPARE=folder)
        with Engine(command, environ, log if log is not None else subprocess.DEVNULL) as engine:
            while True:
                ended = engine.process.poll()
                rows = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
                failed = [row for row in rows if row["outcome"] not in ("published", "attached")]
                if failed:
                    raise NotReady(
                        f"rank {failed[0]['rank']} of {failed[0]['model']} could not publish its state "
                        f"({failed[0]['outcome']}): the engine's log says why"
                    )
                if rows and len(rows) >= max(row["ranks"] * row["roles"] for row in rows):
                    return [Prepared(r["model"], r["role"], r["rank"], r["outcome"], r["generation"]) for r in rows]
                if ended is not None:
                    raise NotReady(f"the engine ended with {ended} before its state was published: its log says why")
                if time.monotonic() > deadline:
                    raise NotReady(f"the state was not published in {timeout:.0f} s: raise --timeout")
                time.sleep(_TURN)
