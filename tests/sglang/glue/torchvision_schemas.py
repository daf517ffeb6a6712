"""Lets torchvision be imported beside a torch that was built without CUDA, in the tests.

The packaged torchvision's library of operators needs CUDA and does not load there; on import torchvision then stumbles over the
operators that it registers fake versions of. Their schemas are all that it needs. Run at interpreter start by a `.pth` line,
this waits for the import of torchvision and defines them first. Nothing of Ballast is in here.
"""

from __future__ import annotations

import sys
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []  # what is defined lasts as long as its library


class Finder:
    """Finds nothing itself; the first search for torchvision defines the schemas."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)


sys.meta_path.insert(0, Finder())
