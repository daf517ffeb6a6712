"""A stand-in for one of vLLM's kernels: weights of four bits on a CPU without AVX-512, for which its builds have none.

Slow and plain arithmetic over the very tensors that the real kernel gets, so that what vLLM makes of a checkpoint can be run
and compared on any machine. Where vLLM has the kernel it is used.
"""

from __future__ import annotations

from typing import Any

import torch

_BITS = torch.arange(0, 32, 4)
_libraries: list[Any] = []  # what is defined lasts as long as its library


def provide() -> None:
    """Defines what is missing of vLLM's operators, after vLLM has defined its own."""
    import vllm._custom_ops  # noqa: F401  (loads the kernels)

    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "cpu_gemm_wna16(Tensor input, Tensor weight, Tensor(a!) output, Tensor scales, Tensor? zeros, Tensor? bias, "
        "int pack_factor, str isa_hint) -> ()"
    )
    library.impl("cpu_gemm_wna16", _gemm, "CPU")
    _libraries.append(library)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 (…, n) of eight numbers each to (…, 8 n)."""
    return (words[..., None] >> _BITS & 15).flatten(-2)


def _gemm(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    bias: torch.Tensor | None, pack_factor: int, isa_hint: str,
) -> None:  # fmt: skip
    """`weight` holds blocks of 16 outputs (outputs / 16, inputs * 2); `scales` and `zeros` a row for each group."""
    groups, outputs = scales.shape
    inputs = x.shape[1]
    values = _unpacked(weight).reshape(outputs // 16, inputs, 16).permute(1, 0, 2).reshape(inputs, outputs).float()
    middle = _unpacked(zeros).float() if zeros is not None else torch.full((groups, outputs), 8.0)
    full = (values.reshape(groups, -1, outputs) - middle[:, None]) * scales[:, None].float()
    product = x.float() @ full.reshape(inputs, outputs)
    output.copy_(product if bias is None else product + bias.float())
