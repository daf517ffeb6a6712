"""Stands in for SGLang's kernels in the tests: no package of them runs without a GPU or AMX.

SGLang imports names from here and, on a plain CPU with torch's own attention, calls only one of them. Any other answers with an
error that says what it is, so that a test cannot mistake the stand-in for a kernel. Nothing of Ballast is in here.
"""

from __future__ import annotations

from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor, end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor, pool_len: int,
) -> None:  # fmt: skip
    """Hands consecutive pieces of `out_cache_loc` out to the requests' rows of the table, from start to end of each."""
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]
        at += end - start


class _Missing:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} is a kernel, and this is only the stand-in for the package sgl_kernel")


def __getattr__(name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
