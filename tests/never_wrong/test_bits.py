"""Every tensor, through every way in, is what safetensors reads from the file, bit by bit."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import engine_shim
from engine_shim import ladder
from engine_shim.handoff.errors import HandoffError, Mismatch
from engine_shim.handoff.identity import TICK_NS
from engine_shim.safe_open import stand_in
from tests.checkpoints import DTYPES, TORCH_DTYPES, Checkpoint, checkpoints, entry, one_of_each
from tests.never_wrong.bits import attempt, everything, look
from tests.never_wrong.loading import Loading
from tests.never_wrong.logs import Lines
from tests.safetensors_api.side_by_side import Failure

drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
ORIGINAL: Any = safetensors.safe_open
OURS: Any = stand_in(safetensors.safe_open)


def settle() -> None:
    """Until a file just written has times that can be trusted: the sidecar would wait for that, for each file."""
    time.sleep(1.1 * TICK_NS / 1e9)


def truth(path: Path, names: list[str]) -> dict[str, Any]:
    with ORIGINAL(path, "pt") as file:
        return {name: attempt(file.get_tensor, name) for name in names}


def check_file(path: Path) -> None:
    """Through the stand-in of `safe_open` and through `load_file`, whatever it does for a file."""
    opened = OURS(path, "pt")
    assert type(opened) is OURS, "it was not served from memory"
    assert everything(opened) == everything(ORIGINAL(path, "pt"))
    wanted = load_file(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors.torch, "safe_open", OURS)
        found = load_file(path)
    if not isinstance(wanted, Failure):  # which of several tensors fails first is a matter of a hash's order
        assert found == wanted
    assert isinstance(found, Failure) == isinstance(wanted, Failure)


def load_file(path: Path) -> Any:
    try:
        return {name: look(tensor) for name, tensor in safetensors.torch.load_file(path).items()}
    except Exception as error:
        return Failure(type(error), str(error))


def check_model(model: Any, files: Mapping[str, tuple[Path, Checkpoint]]) -> None:
    """Through `engine_shim.open`: names, order, metadata and bits. `files`: a shard's name in the checkpoint → itself."""
    expected: dict[str, Any] = {}
    for shard, (path, written) in sorted(files.items()):
        folder = f"{os.path.dirname(shard)}/" if "/" in shard else ""
        for name, value in truth(path, list(written.tensors)).items():
            expected[folder + name] = value
    assert list(model.tensors) == list(expected)
    assert len(model.tensors) == len(expected)
    assert model.metadata == {shard: written.metadata or {} for shard, (_, written) in files.items()}
    for name, value in expected.items():
        found = attempt(model.tensors.__getitem__, name)
        if isinstance(value, Failure):
            assert isinstance(found, Failure), name  # an element type that torch does not have
        else:
            assert found == value, name
    if not any(isinstance(value, Failure) for value in expected.values()):
        state = model.state_dict()
        assert {name: look(tensor) for name, tensor in state.items()} == expected
        assert list(state) == list(expected)


@given(batch=st.lists(checkpoints(DTYPES), min_size=1, max_size=6))
@drawn
def test_any_file(filled: Loading, tmp_path: Path, batch: list[Checkpoint]) -> None:
    """Any element types, names, orders, paddings, alignments; empty files and empty tensors among them."""
    folder = tmp_path / "any"
    folder.mkdir()
    try:
        for number, written in enumerate(batch):
            written.write(folder / f"{number}.safetensors")
        settle()
        for number, written in enumerate(batch):
            path = folder / f"{number}.safetensors"
            generation = filled.load(path, "m")
            with engine_shim.open("m") as model:
                assert model.generation == generation.number
                check_model(model, {path.name: (path, written)})
            check_file(path)
    finally:
        shutil.rmtree(folder)
        drop_all(filled)


def drop_all(filled: Loading) -> None:
    for generation in filled.pool.catalog.generations:
        filled.pool.drop(generation.number)


@given(batch=st.lists(checkpoints(TORCH_DTYPES), min_size=2, max_size=5), index=st.booleans())
@drawn
def test_any_shards(filled: Loading, tmp_path: Path, batch: list[Checkpoint], index: bool) -> None:
    """Several files that make one model, with an index or without."""
    folder = tmp_path / "any"
    folder.mkdir()
    try:
        names = [f"model-{number:05}-of-{len(batch):05}.safetensors" for number in range(len(batch))]
        files = {}
        weight_map = {}
        for number, (name, written) in enumerate(zip(names, batch, strict=True)):
            renamed = Checkpoint(
                {f"{number}.{tensor}": value for tensor, value in written.tensors.items()}, written.metadata,
                written.order and [f"{number}.{tensor}" for tensor in written.order], written.header_padding,
            )  # fmt: skip
            renamed.write(folder / name)
            files[name] = folder / name, renamed
            weight_map.update(dict.fromkeys(renamed.tensors, name))
        if index and weight_map:
            # Then only the files that it names belong to the model: those without a tensor do not.
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
            files = {name: file for name, file in files.items() if file[1].tensors}
        settle()
        filled.load(folder, "m")
        with engine_shim.open("m", checkpoint=folder) as model:
            check_model(model, files)
        for path, _ in files.values():
            check_file(path)
    finally:
        shutil.rmtree(folder)
        drop_all(filled)


# Layouts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_one_of_each(filled: Loading, folder: Path) -> None:
    """Every element type as scalar, vector, matrix and without elements."""
    written = one_of_each(DTYPES)
    written.write(folder / "model.safetensors")
    filled.load(folder)
    check_model(engine_shim.open("m"), {"model.safetensors": (folder / "model.safetensors", written)})
    check_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"e": entry("F32", (0,))},
        {"e": entry("BF16", (0, 3)), "f": entry("I64", (2, 0))},
        {"s": entry("F64", ())},
        {"s": entry("BOOL", ()), "e": entry("F4", (0,)), "t": entry("U8", (1,))},
        {"": entry("F32", (2,))},
    ],
    ids=["no tensor", "one empty", "all empty", "scalar", "mixed", "no name"],
)
def test_small_files(filled: Loading, folder: Path, tensors: dict[str, Any]) -> None:
    written = Checkpoint(tensors)
    written.write(folder / "model.safetensors")
    filled.load(folder)
    check_model(engine_shim.open("m"), {"model.safetensors": (folder / "model.safetensors", written)})
    check_file(folder / "model.safetensors")


def test_a_shard_without_tensors_among_others(filled: Loading, folder: Path) -> None:
    files = {
        "a.safetensors": Checkpoint({}, {"only": "metadata"}), "b.safetensors": Checkpoint({"x": entry("F16", (7,))}),
        "c.safetensors": Checkpoint({"y": entry("F16", (0,))}), "d.safetensors": Checkpoint({}, None),
    }  # fmt: skip
    for name, written in files.items():
        written.write(folder / name)
    filled.load(folder)
    check_model(engine_shim.open("m"), {name: (folder / name, written) for name, written in files.items()})
    for name in files:
        check_file(folder / name)


def test_a_hugging_face_cache(filled: Loading, tmp_path: Path) -> None:
    """Snapshots are links to blobs; the model is called as its repository is."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    files = {}
    for number in range(2):
        name, blob = f"model-{number}.safetensors", repository / "blobs" / f"{number:064}"
        written = Checkpoint({f"{number}.w": entry("BF16", (33, 5), number)}, {"format": "pt"})
        written.write(blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
        files[name] = snapshot / name, written
    (snapshot / "config.json").write_text("{}")
    from sidecar.checkpoint import default_name

    assert default_name(snapshot) == "org/name"
    filled.load(snapshot, "org/name")
    check_model(engine_shim.open("org/name", checkpoint=snapshot), files)
    for path, _ in files.values():
        check_file(path)
        check_file(path.resolve())  # whatever way it is reached


def test_a_pipeline_of_folders(filled: Loading, folder: Path) -> None:
    """As diffusers has it: folders with tensor names of their own, one of them in shards."""
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "P", "unet": ["d", "U"], "vae": ["d", "V"]}))
    files = {
        "unet/diffusion_pytorch_model-00001-of-00002.safetensors": Checkpoint({"w": entry("F32", (3, 3), 1)}),
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors": Checkpoint({"b": entry("F32", (3,), 2)}),
        "vae/diffusion_pytorch_model.safetensors": Checkpoint({"w": entry("F16", (5,), 3)}),
    }
    for name, written in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        written.write(folder / name)
    index = {name: f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for name, n in (("w", 1), ("b", 2))}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    filled.load(folder)
    model = engine_shim.open("m", checkpoint=folder)
    check_model(model, {name: (folder / name, written) for name, written in files.items()})
    assert set(model.tensors) == {"unet/w", "unet/b", "vae/w"}
    for name in files:
        check_file(folder / name)


def test_an_index_that_names_files_in_a_folder(filled: Loading, folder: Path) -> None:
    (folder / "parts").mkdir()
    files = {f"parts/{name}.safetensors": Checkpoint({name: entry("I8", (9,), ord(name))}) for name in "ab"}
    for name, written in files.items():
        written.write(folder / name)
    index = {"a": "parts/a.safetensors", "b": "parts/b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    filled.load(folder)
    check_model(engine_shim.open("m", checkpoint=folder), {name: (folder / name, files[name]) for name in files})
    for name in files:
        check_file(folder / name)


def test_many_models_in_one_pool(filled: Loading, tmp_path: Path) -> None:
    """Each file is served from its own model, also where two models hold the same bytes, or the same names."""
    files = {}
    for number in range(6):
        path = tmp_path / f"{number}.safetensors"
        files[path] = Checkpoint({"w": entry("F32", (100,), number // 2)}, {"number": str(number // 2)})
        files[path].write(path)
    settle()
    for number, path in enumerate(files):
        filled.load(path, f"m{number}")
    for number, (path, written) in enumerate(files.items()):
        check_file(path)
        check_model(engine_shim.open(f"m{number}"), {path.name: (path, written)})
    with pytest.raises(HandoffError, match="say which model"):
        engine_shim.open()


def test_larger_than_one_block(filled: Loading, folder: Path) -> None:
    """Tensors that are read in several pieces, by several threads, with small ones in between, at odd places."""
    written = Checkpoint(
        {
            "small": entry("U8", (5,)), "large": random_entry(9 << 20, 1), "odd": entry("U8", (3,)),
            "exact": random_entry(4 << 20, 2), "more": random_entry((4 << 20) + 1, 3), "last": entry("F64", (2,)),
        },
        order=["odd", "more", "small", "large", "last", "exact"],
        header_padding=5,
    )  # fmt: skip
    written.write(folder / "model.safetensors")
    filled.load(folder)
    model = engine_shim.open("m")
    for name, (_, shape, data) in written.tensors.items():
        if name != "last":
            assert torch.equal(model.tensors[name], torch.frombuffer(bytearray(data), dtype=torch.uint8).view(shape)), (
                name
            )
    [ready] = filled.pool.ready("m")
    assert ready.total == sum(len(data) for _, _, data in written.tensors.values())


def random_entry(size: int, seed: int) -> tuple[str, tuple[int, ...], bytes]:
    generator = torch.Generator().manual_seed(seed)
    return "U8", (size,), torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).numpy().tobytes()


# Modules


class Tree(torch.nn.Module):
    """A module of any tensors, under names with dots as far down as they lead."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], buffers: frozenset[str] = frozenset()) -> None:
        super().__init__()
        for name, value in tensors.items():
            owner: torch.nn.Module = self
            *folders, leaf = name.split(".")
            for folder in folders:
                if folder not in owner._modules:
                    owner.add_module(folder, torch.nn.Module())
                owner = owner.get_submodule(folder)
            if name in buffers:
                owner.register_buffer(leaf, value)
            else:
                owner.register_parameter(leaf, torch.nn.Parameter(value, requires_grad=value.is_floating_point()))


EQUAL_DTYPES = [dtype for dtype in TORCH_DTYPES if dtype != "F4"]  # nothing makes torch fill an F4


@st.composite
def trees(draw: st.DrawFn) -> tuple[Checkpoint, frozenset[str]]:
    """A checkpoint whose names are those of a module's state, and which of them are buffers."""
    leaves = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=6, unique=True))
    names = [f"{draw(st.sampled_from(['', 'x.', 'x.y.', 'z.0.']))}{leaf}" for leaf in leaves]
    tensors = {name: draw(checkpoint_entries) for name in names}
    return Checkpoint(tensors), frozenset(draw(st.sets(st.sampled_from(names))))


checkpoint_entries = st.tuples(
    st.sampled_from(EQUAL_DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99)
).map(lambda parts: entry(parts[0], parts[1], parts[2]))


@given(batch=st.lists(trees(), min_size=1, max_size=4), where=st.sampled_from(["cpu", "meta"]))
@drawn
def test_any_module(
    filled: Loading, tmp_path: Path, batch: list[tuple[Checkpoint, frozenset[str]]], where: str
) -> None:
    folder = tmp_path / "any"
    folder.mkdir()
    try:
        for number, (written, _) in enumerate(batch):
            written.write(folder / f"{number}.safetensors")
        settle()
        for number, (written, buffers) in enumerate(batch):
            path = folder / f"{number}.safetensors"
            filled.load(path, "m")
            expected = truth(path, list(written.tensors))
            with ORIGINAL(path, "pt") as file:
                empty = {name: torch.empty_like(file.get_tensor(name), device=where) for name in written.tensors}
            module = Tree(empty, buffers)
            del empty  # what else looks at the bytes of a module would not follow
            order = list(module.state_dict())
            assert engine_shim.attach(module, "m") is module
            state = module.state_dict()
            assert list(state) == order
            assert {name: look(tensor) for name, tensor in state.items()} == expected
            assert {name for name, _ in module.named_buffers()} == buffers
            for parameter in module.parameters():
                assert type(parameter) is torch.nn.Parameter
                assert parameter.requires_grad == parameter.is_floating_point()
    finally:
        shutil.rmtree(folder)
        drop_all(filled)


class Tied(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4, device=device)
        self.head = torch.nn.Linear(4, 7, bias=False, device=device)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("stored", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]])
def test_tied_weights(filled: Loading, folder: Path, where: str, stored: list[str]) -> None:
    Checkpoint(dict.fromkeys(stored, entry("F32", (7, 4), 5))).write(folder / "model.safetensors")
    filled.load(folder)
    module = Tied(where)
    engine_shim.attach(module, "m")
    assert module.head.weight is module.embed.weight
    assert look(module.head.weight.detach()) == look(truth_tensor(folder, stored[0]))
    assert len(list(module.parameters())) == 1


def truth_tensor(folder: Path, name: str) -> torch.Tensor:
    with ORIGINAL(folder / "model.safetensors", "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def test_tied_in_the_module_but_not_in_the_checkpoint(filled: Loading, folder: Path) -> None:
    """Two tensors for one place: whichever was taken, the other's bits would be lost."""
    Checkpoint({"embed.weight": entry("F32", (7, 4), 5), "head.weight": entry("F32", (7, 4), 6)}).write(
        folder / "model.safetensors"
    )
    filled.load(folder)
    module = Tied("cpu")
    before = look(module.embed.weight.detach())
    with pytest.raises(Mismatch, match="tie"):
        engine_shim.attach(module, "m")
    assert look(module.embed.weight.detach()) == before


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": entry("F32", (4, 2)), "bias": entry("F32", (5,))}, "bias is torch.float32 .5,."),
        ({"weight": entry("BF16", (4, 2)), "bias": entry("F32", (4,))}, "weight is torch.bfloat16"),
        ({"weight": entry("F32", (2, 4)), "bias": entry("F32", (4,))}, "weight is torch.float32 .2, 4."),
        ({"weight": entry("F32", (4, 2))}, "no tensor bias, which the module needs"),
        ({"weight": entry("F32", (4, 2)), "bias": entry("F32", (4,)), "more": entry("F32", (1,))}, "no place for more"),
    ],
)
def test_a_module_of_another_kind_is_left_alone(
    filled: Loading, folder: Path, tensors: dict[str, Any], words: str
) -> None:
    Checkpoint(tensors).write(folder / "model.safetensors")
    filled.load(folder)
    module = torch.nn.Linear(2, 4)
    before = {name: (id(value), look(value.detach())) for name, value in module.named_parameters()}
    with pytest.raises(Mismatch, match=words):
        engine_shim.attach(module, "m")
    assert {name: (id(value), look(value.detach())) for name, value in module.named_parameters()} == before


def test_what_a_module_holds_besides_stays(filled: Loading, folder: Path) -> None:
    """Attributes of parameters, training mode, hooks, buffers that are not saved, and tensors kept as plain attributes."""
    Checkpoint({"weight": entry("F32", (4, 2)), "bias": entry("F32", (4,))}).write(folder / "model.safetensors")
    filled.load(folder)
    module = torch.nn.Linear(2, 4)
    weight: Any = module.weight
    weight.weight_loader = loader = object()
    module.register_buffer("cache", torch.arange(5), persistent=False)
    plain: Any = module
    plain.table = table = torch.arange(3)
    module.bias.requires_grad_(False)
    module.eval()
    engine_shim.attach(module, "m")
    assert plain.weight is weight and weight.weight_loader is loader
    assert plain.cache.tolist() == [0, 1, 2, 3, 4] and plain.table is table
    assert not module.training and module.weight.requires_grad and not module.bias.requires_grad


def test_a_module_on_meta_with_more_than_its_state(filled: Loading, folder: Path) -> None:
    Checkpoint({"weight": entry("F32", (4, 2)), "bias": entry("F32", (4,))}).write(folder / "model.safetensors")
    filled.load(folder)
    module = torch.nn.Linear(2, 4, device="meta")
    module.register_buffer("cache", torch.empty(5, device="meta"), persistent=False)
    with pytest.raises(Mismatch, match="cache is not part of a checkpoint"):
        engine_shim.attach(module, "m")
    assert module.weight.is_meta


# How long the bits last


def test_tensors_outlive_what_they_came_from(filled: Loading, folder: Path, lines: Lines) -> None:
    written = Checkpoint({"a": entry("F32", (1000,), 1), "b": entry("F32", (1000,), 2)})
    written.write(folder / "model.safetensors")
    filled.load(folder)
    expected = truth(folder / "model.safetensors", ["a", "b"])
    model = engine_shim.open("m")
    kept = model.tensors["a"]
    model.close()
    with OURS(folder / "model.safetensors", "pt") as file:
        other = file.get_tensor("b")
    del model, file
    gc.collect()
    held = [record.generation for record in attached(filled)]
    assert held == [1]
    filled.pool.retire(1)
    assert filled.pool.collect() == 0  # somebody still has a tensor
    assert look(kept) == expected["a"] and look(other) == expected["b"]
    del kept
    gc.collect()
    assert [record.generation for record in attached(filled)] == [1]
    del other
    gc.collect()
    assert not attached(filled)
    assert filled.pool.collect() > 0


def attached(filled: Loading) -> list[Any]:
    from engine_shim.handoff import attachment

    return list(attachment.alive(filled.paths))


def test_tensors_outlive_the_pool(filled: Loading, folder: Path) -> None:
    """What was not looked at before the pool was removed, or made anew for another model, is there all the same."""
    written = Checkpoint({"a": entry("F32", (1000,), 1)})
    written.write(folder / "model.safetensors")
    Checkpoint({"a": entry("F32", (1000,), 9)}).write(folder.parent / "other.safetensors")
    filled.load(folder)
    expected = truth(folder / "model.safetensors", ["a"])
    model = engine_shim.open("m")
    filled.pool.close(remove=True)
    from sidecar.pool import PoolWriter

    filled.pool = filled._sidecar._pool = PoolWriter(filled.paths)
    other = filled.load(folder.parent / "other.safetensors", "other")
    assert other.number == model.generation == 1  # numbers begin again: not even they tell the two apart
    with engine_shim.open("other") as now:
        assert look(now.tensors["a"]) != expected["a"]
        # The first model's hold is on a pool that is gone; this one's is its own, or the sidecar would not see it.
        assert [record.model for record in attached(filled)] == ["other"]
    assert look(model.tensors["a"]) == expected["a"]


@pytest.fixture(autouse=True)
def quiet(lines: Lines) -> Iterator[None]:
    """No test of this file may be served from the disk because something of ours failed."""
    yield
    assert not [line for line in lines.all if "without Ballast" in line]
    assert ladder._pools is not None
