"""Engines whose state is kept while somebody looks at bytes of their model: for test_keeping.py, each a process of its own."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from engine_shim import modules
from engine_shim.handoff import manifest, maps
from engine_shim.handoff.errors import HandoffError
from engine_shim.handoff.names import PoolPaths
from engine_shim.state import Keeper

COUNT = 1 << 16  # elements of a weight, more than are copied rather than moved


class Model(torch.nn.Module):
    """Two parameters and whatever else a case hangs on it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.zeros(COUNT), requires_grad=False)
        self.two = torch.nn.Parameter(torch.zeros(COUNT), requires_grad=False)


class Case:
    """What is done to a model: as it is `built`, as its weights are `loaded`. Both may return somebody who looks at bytes."""

    def __init__(self, built: Callable[[Model], Any] = lambda _: None, loaded: Callable[[Model], Any] = lambda _: None) -> None:
        self.built, self.loaded = built, loaded


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) + number)


def hung(name: str, made: Callable[[Model], Any]) -> Callable[[Model], None]:
    def hang(model: Model) -> None:
        setattr(model, name, made(model))

    return hang


def buffer_of_a_base(model: Model) -> torch.Tensor:
    """A view in the tree; what it was made of is held by somebody else."""
    base = torch.zeros(2 * COUNT)
    model.register_buffer("view", base[COUNT:])
    return base


def tied(model: Model) -> None:
    model.two = model.one


def same_bytes(model: Model) -> None:
    model.register_buffer("two_flat", model.two.data.view(256, -1)[3:])
    model.three = torch.nn.Parameter(model.two.data[7:], requires_grad=False)
    model.ints = model.two.data.view(torch.int32)


def shared_tree(model: Model) -> torch.nn.Module:
    other = torch.nn.Module()
    other.weight = model.one
    other.part = torch.nn.Parameter(model.two.data[COUNT // 2 :], requires_grad=False)
    return other


def of_a_file(model: Model) -> None:
    """As torch.load(mmap=True) and safetensors leave it: no page of it has been read yet."""
    with tempfile.NamedTemporaryFile() as file:
        torch.arange(COUNT, dtype=torch.float32).numpy().tofile(file.name)
        model.register_buffer("table", torch.from_file(file.name, shared=False, size=COUNT))


def in_shared_memory(model: Model) -> torch.Tensor:
    """As share_memory() leaves it; another process's map of the same."""
    with tempfile.NamedTemporaryFile() as file:
        torch.arange(COUNT, dtype=torch.float32).numpy().tofile(file.name)
        model.two = torch.nn.Parameter(torch.from_file(file.name, shared=True, size=COUNT), requires_grad=False)
        return torch.from_file(file.name, shared=True, size=COUNT)


def replaced(model: Model) -> torch.Tensor:
    old = model.one
    model.register_parameter("late", torch.nn.Parameter(torch.full((COUNT,), 6.0), requires_grad=False))
    model.late.weight_loader = fill
    model.one = torch.nn.Parameter(torch.full((COUNT,), 7.0), requires_grad=False)
    model.two.data = torch.full((COUNT,), 8.0)
    return old


def inference(model: Model) -> None:
    with torch.inference_mode():
        model.frozen = torch.full((COUNT,), 3.0)


def conjugate(model: Model) -> None:
    model.register_buffer("freqs", torch.full((COUNT,), 1 + 2j))
    model.register_buffer("back", model.freqs.conj())


def of_an_array(model: Model) -> numpy.ndarray[Any, Any]:
    """Memory that is not torch's: whose it is may write to it by another way."""
    array = numpy.zeros(COUNT, numpy.float32)
    model.two = torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
    return array


class Part:
    """Something of an engine's that is no module."""

    def __init__(self) -> None:
        self.scale = torch.zeros(3)
        self.factor = 1.0


def furnished(model: Model) -> None:
    """What a state does not bring along, as an engine builds it."""
    model.act = torch.nn.ReLU()
    model.list = [torch.zeros(3), {"a": torch.zeros(3), "b": 1}]
    model.part = Part()
    model.outside = [torch.nn.Linear(2, 2).requires_grad_(False)]
    model.pending = True
    vars(model.one)["shards"] = []


def with_tensors(model: Model) -> None:
    """Attributes become tensors, which are captured as such."""
    model.pending = torch.full((COUNT,), 4.0)
    model.part = torch.full((3,), 5.0)


def changing(how: Callable[[Model], Any]) -> Case:
    def loaded(model: Model) -> None:
        with torch.no_grad():
            how(model)

    return Case(furnished, loaded)


def two_storages(model: Model) -> None:
    array = numpy.zeros(2 * COUNT, numpy.float32)
    model.register_buffer("head", torch.from_numpy(array[:COUNT]))
    model.register_buffer("all", torch.from_numpy(array))


def overlapping(model: Model) -> None:
    array = numpy.zeros(2 * COUNT, numpy.float32)
    model.register_buffer("first", torch.from_numpy(array[: COUNT + 8]))
    model.register_buffer("last", torch.from_numpy(array[COUNT:]))


TABLE = "table"


def addressed(model: Model) -> numpy.ndarray[Any, Any]:
    """Whoever has an address alone looks at bytes, and nobody knows of him."""
    model.register_buffer(TABLE, torch.tensor([0, model.one.data_ptr()]))
    return at(model.one)


def addressed_by_a_number(model: Model) -> numpy.ndarray[Any, Any]:
    model.address = model.one.data_ptr()
    return at(model.one)


def at(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    return numpy.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


CASES = {
    "nobody": Case(),
    "tied": Case(tied),
    "tied while loading": Case(loaded=tied),
    "several tensors of the tree": Case(same_bytes),
    "several tensors of the tree, made while loading": Case(loaded=same_bytes),
    "a view in a list": Case(lambda m: [m.one.data[5:]]),
    "a view in a list, made while loading": Case(loaded=lambda m: [m.one.data[5:]]),
    "views for each expert": Case(loaded=lambda m: [m.one.data[i::8] for i in range(8)]),
    "a closure's": Case(loaded=lambda m: (lambda view: (lambda: view))(m.two.detach())()),
    "the base of a view": Case(buffer_of_a_base),
    "the base of a view, made while loading": Case(loaded=buffer_of_a_base),
    "an array": Case(lambda m: m.one.data.numpy()),
    "an array, made while loading": Case(loaded=lambda m: m.one.numpy()),
    "an array by DLPack": Case(lambda m: numpy.from_dlpack(m.one.data)),
    "an array by DLPack, made while loading": Case(loaded=lambda m: numpy.from_dlpack(m.one)),
    "an array by DLPack of the parameter": Case(lambda m: numpy.from_dlpack(m.one)),
    "a tensor by DLPack": Case(loaded=lambda m: torch.from_dlpack(m.one)),
    "a memoryview": Case(loaded=lambda m: memoryview(m.one.numpy())),
    "a storage": Case(loaded=lambda m: m.one.untyped_storage()),
    "another tree": Case(loaded=shared_tree),
    "a list of parameters": Case(loaded=lambda m: list(m.parameters())),
    "parameters that loading replaces": Case(loaded=replaced),
    "an inference tensor": Case(inference),
    "an inference tensor, made while loading": Case(loaded=inference),
    "a map of a file": Case(of_a_file),
    "a map of a file, made while loading": Case(loaded=of_a_file),
    "shared memory": Case(in_shared_memory),
    "shared memory, made while loading": Case(loaded=in_shared_memory),
    "an array's memory": Case(of_an_array),
    "what loading leaves as it is": changing(lambda m: None),
    "attributes that become tensors": Case(lambda m: setattr(m, "pending", None) or setattr(m, "part", 1), with_tensors),
    "a transposed one": Case(hung("two", lambda m: torch.nn.Parameter(torch.zeros(256, 256).t(), requires_grad=False))),
}
REFUSED = {
    "a conjugate": Case(conjugate),
    "a conjugate, made while loading": Case(loaded=conjugate),
    "two storages at one place": Case(two_storages),
    "overlapping storages": Case(overlapping),
    "an address": Case(addressed),
    "an address, taken while loading": Case(loaded=addressed),
    "an address in an attribute": Case(addressed_by_a_number),
    "an address in an attribute, taken while loading": Case(loaded=addressed_by_a_number),
    "a tensor in a list": changing(lambda m: m.list[0].fill_(1)),
    "another tensor in a dictionary": changing(lambda m: m.list[1].update(a=torch.ones(3))),
    "a number in a dictionary": changing(lambda m: m.list[1].update(b=2)),
    "a number in a list": changing(lambda m: m.list.append(1)),
    "a tensor of an object": changing(lambda m: m.part.scale.fill_(1)),
    "a number of an object": changing(lambda m: setattr(m.part, "factor", 2.0)),
    "a module outside of the tree": changing(lambda m: m.outside[0].weight.fill_(1)),
    "a list of a parameter": changing(lambda m: m.one.shards.append(torch.ones(3))),
    "another module": changing(lambda m: setattr(m, "act", torch.nn.SiLU())),
    "a module more": changing(lambda m: setattr(m, "norm", torch.nn.Identity())),
    "a hook": changing(lambda m: m.register_forward_hook(lambda *_: None)),
    "no more training": changing(lambda m: m.eval()),
    "an attribute less": changing(lambda m: delattr(m, "pending")),
}


def start(case: Case, keeper: Keeper | None = None, gives_up: bool = False) -> tuple[Model, list[Any]]:
    model = Model()
    seen = [case.built(model)]
    given_up = keeper is not None and fails(keeper.move, model)
    fill(model)
    seen.append(case.loaded(model))
    if keeper is not None:
        given_up = given_up or fails(keeper.loaded, model) or fails(keeper.process, model, keeper.levels)
        assert given_up == gives_up
    return model, seen


def fails(step: Callable[..., None], *args: Any) -> bool:
    try:
        step(*args)
    except HandoffError:
        return True
    return False


def tensors(model: Model, seen: list[Any]) -> list[torch.Tensor]:
    """Everything that looks at bytes, in the same order in every start."""
    found = [slot.tensor for slot in modules.slots(model) if slot.name != TABLE]
    for item in [part for one in seen for part in (one if isinstance(one, list) else [one])]:
        if isinstance(item, torch.nn.Module):
            found += [slot.tensor for slot in modules.slots(item)]
        elif isinstance(item, torch.UntypedStorage):
            found.append(torch.empty(0, dtype=torch.uint8).set_(item))
        elif isinstance(item, (numpy.ndarray, memoryview)):
            found.append(torch.frombuffer(item, dtype=torch.float32))
        elif isinstance(item, torch.Tensor):
            found.append(item)
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def written(looking: list[torch.Tensor], index: int) -> list[bytes]:
    """What all see when one of them has written."""
    with torch.inference_mode():
        looking[index].data[-1:] = index + 100
        looking[index].data[: len(looking[index]) // 3] = index + 100
    return [bits(tensor) for tensor in looking]


def segments(paths: PoolPaths) -> dict[str, bytes]:
    return {n.file: Path(paths.dir, n.file).read_bytes() for n in paths.objects() if n.kind == "publication"}


def mapped(paths: PoolPaths) -> list[str]:
    """Maps of the pool's files through which this process could write to them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"ballast-{paths.pool}.in" in line and "w" in line.split()[1] and "s" in line.split()[1]]


def compare(model: Model, seen: list[Any], name: str) -> list[str]:
    """In what a model, and those who look at its bytes, differ from those of an engine without Ballast."""
    found = []
    plain, kept = tensors(*start({**CASES, **REFUSED}[name])), tensors(model, seen)
    for step in range(-1, len(plain)):
        wanted, got = (written(each, step) if step >= 0 else list(map(bits, each)) for each in (plain, kept))
        differ = [row for row, pair in enumerate(zip(wanted, got, strict=True)) if len(set(pair)) > 1]
        found += [f"tensor {row} once tensor {step} was written to" for row in differ]
    return found


def kept(pool: str, name: str, levels: dict[str, str]) -> list[str]:
    """What is otherwise in an engine whose state is kept: empty, if all is well."""
    paths = PoolPaths(pool)
    keeper = Keeper("m", paths, levels)
    try:
        model, seen = start(CASES[name], keeper)
        state = keeper.finish(model, "final")
        for thread in threading.enumerate():
            if thread.name == "ballast-maps":
                thread.join(10)
        found = [f"{line} is still writable" for line in mapped(paths)]
        keeper.commit(state, {}, "k")
        before = segments(paths)
        found += compare(model, seen, name)
        found += ["what was published has changed"] if segments(paths) != before else []
        fresh, _ = start(CASES[name])
        found += [f"{label} was published otherwise" for label in unlike(paths, keeper.identifier, fresh)]
    finally:
        keeper.close()
    return found


def given_up(pool: str, name: str, levels: dict[str, str], refused: bool) -> list[str]:
    """The same where the state cannot be kept, as turns out once it is loaded. `refused`: the kernel has no private maps."""
    paths = PoolPaths(pool)
    if refused:
        maps.make_private = maps.private = no_map
    keeper = Keeper("m", paths, levels)
    try:
        model, seen = start({**CASES, **REFUSED}[name], keeper, gives_up=True)
    finally:
        keeper.close()
    return compare(model, seen, name) + [f"{file} is left" for file in segments(paths)]


def no_map(*_: Any) -> None:
    raise HandoffError("there is no more address space")


def unlike(paths: PoolPaths, identifier: str, model: Model) -> list[str]:
    """The tensors of the tree whose published bytes are not those of `model`."""
    contents = manifest.read(paths.publication(identifier))
    found = []
    here = {(slot.path, slot.name): slot for slot in modules.slots(model)}
    for row in modules.slot_rows(contents):
        place = contents.tensors[row.storage]
        data = paths.publication_segment(identifier, place.segment).read_bytes()[place.offset : place.offset + place.nbytes]
        flat = torch.frombuffer(bytearray(data), dtype=modules.DTYPES[row.dtype])
        there = flat.as_strided(row.shape, row.strides, row.offset)
        slot = here.pop((row.path, row.name))
        if not torch.equal(there, slot.tensor.detach()):
            found.append(slot.label)
    return found + [slot.label for slot in here.values()]
