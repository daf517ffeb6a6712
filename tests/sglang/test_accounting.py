"""SGLang's memory accounting counts what is attached on a device exactly once: its own functions, with our figures.

There is no device here: its memory is a stand-in (test_device.py has more of one). Not yet run on a device.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from conftest import ATTACHED, Engines, adopted

from engine_shim.device import Copy, Gpu
from engine_shim.hooks.sglang import foreign_bytes
from tests.processes import Sidecar

GIB = 1 << 30


def test_only_what_was_mapped_and_each_allocation_once() -> None:
    one, other = SimpleNamespace(size=5000), SimpleNamespace(size=64)
    copy = Copy(Gpu(0, "GPU-0", "a GPU", GIB), [], [one, one, other])  # type: ignore[list-item]
    assert foreign_bytes(copy) == 5064
    assert foreign_bytes(SimpleNamespace(imports=[one])) == 0  # segments in host memory


def test_the_same_room_is_left_for_the_cache_attached_or_loaded(engines: Engines, checkpoints: Path) -> None:
    """80 GiB, 20 of them weights. Loaded, they are free before and gone after; attached, they are gone before as well."""
    cases = {
        "loaded": (80.0, 60.0, 0),
        "attached": (60.0, 60.0, 20 * GIB),
        "not told": (60.0, 60.0, 0),
        "told twice": (60.0, 60.0, 40 * GIB),
    }
    found, _ = engines.run(checkpoints / "llama", accounting=cases, args={"mem_fraction_static": 0.8})
    assert found["attached"] == found["loaded"] == 44 * GIB
    assert found["not told"] != found["loaded"] != found["told twice"]


def test_an_attached_engine_tells_sglang_what_it_mapped_and_any_other_nothing(
    engines: Engines, checkpoints: Path, pool: str
) -> None:
    model = checkpoints / "llama"
    with Sidecar(pool, model) as sidecar:
        sidecar.ready("llama")
        first, _ = engines.run(model, pool, only="load", foreign=12345)
        adopted(sidecar, 1)
        attached, log = engines.run(model, pool, only="load", foreign=12345)
        on_a_cpu, again = engines.run(model, pool, only="load")
        assert ATTACHED in log and ATTACHED in again
        assert (first["preloaded"], attached["preloaded"], on_a_cpu["preloaded"]) == (0, 12345, 0)
        sidecar.interrupt()
