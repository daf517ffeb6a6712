"""Stand-ins for the kernels that SGLang's post-processing of quantised weights calls, so that it runs on any machine.

What they make is no weights that a kernel could use: bytes in another order, as the real ones make. It is SGLang's own code
around them that is run: its layers, loaders, and what post-processing does to parameters (repacks, transposes, replaces,
requantises in place, drops).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_FP8 = torch.float8_e4m3fn


def scaled(values: torch.Tensor, scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """To eight-bit floating point, with this scale or the one that fits."""
    largest = torch.finfo(_FP8).max
    used = values.abs().max().float() / largest if scale is None else scale.float()
    return (values.float() / used).clamp(-largest, largest).to(_FP8), used


def repacked(
    b_q_weight: torch.Tensor, perm: torch.Tensor | None = None, *, size_k: int, size_n: int, num_bits: int
) -> torch.Tensor:
    """Marlin's shape, with the words in another order."""
    return b_q_weight.t().contiguous().view(size_k // 16, size_n * (num_bits // 2))


def yes(*_: Any, **__: Any) -> bool:
    """What a GPU that has the kernel would say."""
    return True


class FourBits:
    """SGLang's name for a type that the package of its kernels defines."""

    size_bits = 4


def workspace(device: torch.device, *_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.int32, device=device)


_QUANTISATION = "sglang.srt.layers.quantization"
_GPU = "sglang.srt.hardware_backend.gpu.quantization"
_FOUR = FourBits()
_MARLIN = {"gptq_marlin_repack": repacked, "marlin_make_workspace": workspace}
_PROVIDED: dict[str, dict[str, Any]] = {
    f"{_QUANTISATION}.utils": {"scaled_fp8_quant": scaled},
    f"{_QUANTISATION}.fp8": {"scaled_fp8_quant": scaled, "_is_cpu": False},
    f"{_QUANTISATION}.gptq.gptq": {"check_marlin_supported": yes},
    f"{_QUANTISATION}.gptq.gptq:GPTQMarlinConfig": {"TYPE_MAP": {(4, True): _FOUR}},
    f"{_QUANTISATION}.gptq.schemes.gptq_marlin": {"verify_marlin_supported": yes},
    f"{_QUANTISATION}.awq.awq": {"check_marlin_supported": yes, "verify_marlin_supported": yes, "_is_cuda": True},
    f"{_QUANTISATION}.awq.awq:AWQMarlinConfig": {"TYPE_MAP": {4: _FOUR}},
    f"{_QUANTISATION}.marlin_utils_fp4": _MARLIN,
    f"{_QUANTISATION}.compressed_tensors.schemes.compressed_tensors_wNa16": {
        **_MARLIN, "WNA16_SUPPORTED_TYPES_MAP": {4: _FOUR},
    },
    f"{_QUANTISATION}.compressed_tensors.compressed_tensors:CompressedTensorsConfig": {"_check_scheme_supported": yes},
    f"{_GPU}.gptq_kernels": _MARLIN,
    f"{_GPU}.awq_kernels": {"awq_marlin_repack": repacked, "marlin_make_workspace": workspace},
}  # fmt: skip


def provide() -> None:
    """In this process, for good."""
    for place, values in _PROVIDED.items():
        name, _, kind = place.partition(":")
        owner: Any = importlib.import_module(name)
        for attribute, value in values.items():
            setattr(getattr(owner, kind) if kind else owner, attribute, value)
