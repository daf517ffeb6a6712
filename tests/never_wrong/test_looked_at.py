"""Who else looks at a module's bytes, and which of them are a process's own: what an adapter has to know before it exchanges
them, and after an engine has written to them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine_shim import state
from engine_shim.handoff import maps
from engine_shim.handoff.errors import Mismatch
from engine_shim.handoff.names import PoolPaths


def tree() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Module())
    module[1].weight = module[0].weight  # a tie
    module[2].view = module[0].bias.detach().view(8, 8)  # a view that is part of the tree
    module[2].register_buffer("twice", module[2].view)
    module[2].another = module[1].bias.view(4, 16)
    return module


def test_ties_and_views_within_the_tree_are_no_others() -> None:
    state.check_seen_nowhere_else(tree())


@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.bias"])
def test_a_view_outside_the_tree_is_found(name: str) -> None:
    module = tree()
    module[1].views = [module.get_parameter(name).detach()[1:]]
    with pytest.raises(Mismatch, match=rf"{name} is looked at from outside the module tree"):
        state.check_seen_nowhere_else(module)
    module[1].views.clear()
    state.check_seen_nowhere_else(module)


def test_a_processs_own_pages_of_a_generation_are_counted(tmp_path: Path) -> None:
    paths = PoolPaths("own", tmp_path)
    buffers = []
    for generation, segment in ((7, 0), (7, 1), (70, 0)):
        path = paths.segment(generation, segment)
        path.write_bytes(bytes(mmap.PAGESIZE * 8))
        with open(path, "rb") as file:
            buffers.append(maps.private(file.fileno(), mmap.PAGESIZE * 8))
    assert sum(sum(bytes(buffer)) for buffer in buffers) == 0  # reading makes nothing one's own
    assert state.own_bytes(paths, 7) == 0
    buffers[0][0] = buffers[0][mmap.PAGESIZE * 3] = buffers[1][5] = buffers[2][0] = 1
    assert state.own_bytes(paths, 7) == 3 * mmap.PAGESIZE
    assert state.own_bytes(paths, 70) == mmap.PAGESIZE
