"""Safetensors files for tests, written byte by byte so that they can have any legal oddity; strategies to draw them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from engine_shim.handoff.dtypes import BITS

DTYPES = tuple(BITS)
TORCH_DTYPES = tuple(dtype for dtype in DTYPES if not dtype.startswith("F6"))  # those that torch can hold
Entry = tuple[str, Sequence[int], bytes]  # dtype, shape, data


def write(
    path: str | Path,
    tensors: Mapping[str, Entry],
    metadata: Mapping[str, str] | None = None,
    order: Sequence[str] | None = None,
    header_padding: int = 0,
) -> None:
    """Write a safetensors file.

    The header lists the tensors as `tensors` does; their bytes follow without gaps in `order` (default: the same).
    `header_padding` spaces end the header; nothing else is done about alignment, so data may begin at any offset.
    """
    starts, position = {}, 0
    for name in order if order is not None else tensors:
        starts[name] = position
        position += len(tensors[name][2])
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, (dtype, shape, data) in tensors.items():
        end = starts[name] + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, ensure_ascii=False).encode() + b" " * header_padding
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in starts:
            file.write(tensors[name][2])


@dataclass
class Checkpoint:
    """The content of one file, and how it is to be written."""

    tensors: dict[str, Entry]
    metadata: dict[str, str] | None = None
    order: list[str] | None = None
    header_padding: int = 0

    def write(self, path: str | Path) -> None:
        write(path, self.tensors, self.metadata, self.order, self.header_padding)


def entry(dtype: str, shape: Sequence[int], seed: int = 0) -> Entry:
    """A tensor with some bytes that differ from position to position."""
    size = BITS[dtype] * math.prod(shape) // 8
    return dtype, tuple(shape), bytes((seed * 131 + 7 * i + i // 251) % 256 for i in range(size))


def one_of_each(dtypes: Sequence[str] = DTYPES) -> Checkpoint:
    """Each of these element types as vector, matrix, scalar and without elements, in an order that is no default."""
    tensors: dict[str, Entry] = {}
    for seed, dtype in enumerate(reversed(dtypes)):
        shapes: list[tuple[int, ...]] = [(4,), (2, 3, 4), (0,), (2, 0, 4)]
        if BITS[dtype] >= 8:
            shapes += [(), (1,), (3, 1)]
        for shape in shapes:
            tensors[f"{dtype}.{'x'.join(map(str, shape)) or 'scalar'}"] = entry(dtype, shape, seed)
    order = sorted(tensors, key=lambda name: name[::-1])
    return Checkpoint(tensors, {"format": "pt", "ümlaut": "ö"}, order, header_padding=3)


# Anything goes in a name except what JSON cannot carry and the one name that the format keeps for itself.
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
metadata = st.none() | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), names, max_size=3)
shapes = (
    st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4, 5, 8]), max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 500)
)


@st.composite
def entries(draw: st.DrawFn, dtypes: Sequence[str] = DTYPES) -> Entry:
    """Any tensor of any element type, with any bytes."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(shapes)
    if BITS[dtype] * math.prod(shape) % 8:
        shape = (*shape, 4)  # packed elements have to end on a whole byte
    size = BITS[dtype] * math.prod(shape) // 8
    data = draw(st.binary(min_size=min(size, 32), max_size=min(size, 32)))
    return dtype, shape, (data * (size // 32 + 1))[:size]


@st.composite
def checkpoints(draw: st.DrawFn, dtypes: Sequence[str] = DTYPES, max_tensors: int = 6) -> Checkpoint:
    """Any legal file: names, element types, shapes, bytes, metadata, order of the data, alignment."""
    tensors = draw(st.dictionaries(names, entries(dtypes), max_size=max_tensors))
    return Checkpoint(
        tensors,
        draw(metadata),
        draw(st.none() | st.permutations(list(tensors))),
        draw(st.integers(0, 9)),
    )


_bounds = st.none() | st.integers(-9, 9)
_ints = st.integers(-6, 6)
_plain_indices = st.one_of(
    _ints,
    _ints,
    st.slices(4),
    st.builds(slice, _bounds, _bounds, st.none() | st.integers(-2, 3)),
    st.just(slice(None)),
    st.none(),
    st.just(...),
    st.booleans(),
)
_odd_indices = st.one_of(
    st.lists(st.integers(-3, 3), max_size=3),
    st.lists(st.booleans(), max_size=3),
    st.lists(st.slices(3), max_size=2),
    st.just("name"),
    st.just(1.5),
    st.just(b""),
    st.integers(1 << 31, 1 << 70),
    st.just({}),
)
indices = st.one_of(
    _plain_indices,
    st.lists(_plain_indices, max_size=5).map(tuple),
    st.lists(_plain_indices | _odd_indices, max_size=4).map(tuple),
    _odd_indices,
)
