"""Whatever a program does with `safe_open`, it sees the same from memory as from safetensors: values and failures."""

from __future__ import annotations

import copy
import inspect
import io
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import DTYPES, TORCH_DTYPES, Checkpoint, checkpoints, entry, indices, one_of_each, write
from tests.safetensors_api.side_by_side import SAFE_OPEN, SAFE_OPEN_HANDLE, Failure, Pair, Pool, outcome, seen

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
drawn = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

PLAIN_DTYPES = tuple(dtype for dtype in DTYPES if dtype[:2] not in ("F4", "F6"))  # of which none lie several in a byte
BACKENDS = ("mmap", "pread")
INDICES: tuple[Any, ...] = (
    0, slice(1, None), ..., (slice(None), 0), (..., slice(0, 2)), None, [0, 1], slice(None, None, 2)
)  # fmt: skip
DEVICES = ("cpu", None, "cuda", "cuda:1", 0, True, "mps", "mps:0", "xpu", "xpu:1", "npu", "xla", "mlu", "musa", "hpu")


def same(pair: Pair, action: Callable[..., Any], *args: Any) -> Any:
    """Does the same to both, calling `action(side, *args)`, and returns what both gave."""
    original, ours = (outcome(action, side, *args) for side in pair)
    assert ours == original
    return original


def part_of(file: Any, name: str, index: Any) -> Any:
    return file.get_slice(name)[index]


def opened(path: Any, framework: Any = "pt", *args: Any, **kwargs: Any) -> Pair:
    pair = Pair(*(side(path, framework, *args, **kwargs) for side in SAFE_OPEN))
    assert type(pair.original) is safetensors.safe_open
    assert type(pair.ours) is SAFE_OPEN.ours
    return pair


def files_of(pair: Pair, checkpoint: Checkpoint) -> None:
    """Everything that is not slicing."""
    same(pair, lambda file: file.keys())
    same(pair, lambda file: file.metadata())
    for side in pair:  # tensors without bytes share their place with others: safetensors orders those at random
        assert sorted(side.offset_keys()) == sorted(checkpoint.tensors)
    same(pair, lambda file: [name for name in file.offset_keys() if checkpoint.tensors[name][2]])
    for name in checkpoint.tensors:
        same(pair, lambda file, name: file.get_tensor(name), name)
        same(pair, lambda file, name: file.get_tensor(name=name), name)
        same(pair, lambda file, name: file.get_slice(name).get_shape(), name)
        same(pair, lambda file, name: file.get_slice(name).get_dtype(), name)
    original, ours = (outcome(side.get_tensors) for side in pair)
    if isinstance(original, Failure) and not all(data for _, _, data in checkpoint.tensors.values()):
        # Which of the tensors fails first is a matter of that order.
        assert ours in [outcome(pair.original.get_tensor, name) for name in checkpoint.tensors]
    else:
        assert ours == original
        same(pair, lambda file: [name for name in file.get_tensors() if checkpoint.tensors[name][2]])


def slices_of(pair: Pair, checkpoint: Checkpoint) -> None:
    for name in checkpoint.tensors:
        for index in INDICES:
            same(pair, part_of, name, index)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# What a program may have told torch of tensors for which it says nothing.
DEFAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "as torch comes": nullcontext,
    "a device": lambda: torch.device("meta"),
    "a type": lambda: default_dtype(torch.bfloat16),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    one_of_each().write(path)
    return path


# Values


@pytest.mark.parametrize("backend", BACKENDS)
@given(checkpoint=checkpoints())
@drawn
def test_any_file(pool: Pool, tmp_path: Path, backend: str, checkpoint: Checkpoint) -> None:
    checkpoint.write(tmp_path / "any.safetensors")
    files_of(opened(tmp_path / "any.safetensors", backend=backend), checkpoint)


@pytest.mark.parametrize("backend", BACKENDS)
@given(checkpoint=checkpoints(), index=indices, data=st.data())
@settings(parent=drawn, max_examples=300)
def test_any_slice(pool: Pool, tmp_path: Path, backend: str, checkpoint: Checkpoint, index: Any, data: Any) -> None:
    checkpoint.write(tmp_path / "any.safetensors")
    pair = opened(tmp_path / "any.safetensors", backend=backend)
    for name in checkpoint.tensors:
        same(pair, part_of, name, index)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_type_on_every_device(pool: Pool, path: str, device: Any, backend: str) -> None:
    pair = opened(path, "pt", device, backend=backend)
    files_of(pair, one_of_each())
    slices_of(pair, one_of_each())


@pytest.mark.parametrize("defaults", list(DEFAULTS)[1:])
@pytest.mark.parametrize("device", ["cpu", "cuda:1", 0, "xpu"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_element_type_with_other_defaults(pool: Pool, path: str, backend: str, device: Any, defaults: str) -> None:
    before = opened(path, "pt", device, backend=backend)
    with DEFAULTS[defaults]():
        for pair in (before, opened(path, "pt", device, backend=backend)):
            files_of(pair, one_of_each())
            slices_of(pair, one_of_each())


@pytest.mark.parametrize("backend", BACKENDS)
@given(checkpoint=checkpoints(), index=indices)
@drawn
def test_any_file_and_slice_with_another_default_device(
    pool: Pool, tmp_path: Path, backend: str, checkpoint: Checkpoint, index: Any
) -> None:
    checkpoint.write(tmp_path / "any.safetensors")
    with torch.device("meta"):
        pair = opened(tmp_path / "any.safetensors", backend=backend)
        files_of(pair, checkpoint)
        for name in checkpoint.tensors:
            same(pair, part_of, name, index)


@pytest.mark.parametrize("defaults", DEFAULTS)
def test_the_way_to_a_gpu(pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch, defaults: str) -> None:
    """By way of pinned memory, which needs a driver; without one, see that the bytes that would go there are right."""
    empty = torch.empty
    with torch.device("meta"):
        empty(0)  # torch remembers at the first call which functions follow the default device

    def unpinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        made = empty(*args, **kwargs)
        made.untyped_storage().fill_(0xA5)
        return made

    class Sent(Exception):
        pass

    def send(tensor: torch.Tensor, device: Any) -> torch.Tensor:
        assert device == "cuda:1"
        raise Sent(seen(tensor))

    here = opened(path).original
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.Tensor, "to", send)
    for backend in BACKENDS:
        pair = opened(path, "pt", "cuda:1", backend=backend)
        for name in one_of_each(TORCH_DTYPES).tensors:
            with DEFAULTS[defaults](), pytest.raises(Sent) as caught:
                pair.ours.get_tensor(name)
            assert caught.value.args[0] == seen(here.get_tensor(name))
            with DEFAULTS[defaults]():
                assert same(pair, lambda file, name: file.get_tensor(name), name).type is Sent


def test_every_plain_type_is_served_from_memory(pool: Pool, path: str) -> None:
    one_of_each(PLAIN_DTYPES).write(path)
    file = opened(path).ours
    os.unlink(path)
    for name in file.offset_keys():
        file.get_tensor(name), file.get_slice(name)[...]
    assert file._file is None


def test_packed_pairs_are_served_from_memory(pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(path).ours
    monkeypatch.setattr(SAFE_OPEN.ours, "_original", None)
    assert file.get_tensor("F4.2x3x4").shape == (2, 3, 2)


def test_indexing_with_tensors(pool: Pool, tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": entry("F32", (4, 5))})
    pair = opened(tmp_path / "m")
    for index in (
        torch.tensor(1),
        torch.tensor([1, 2]),
        torch.tensor([True, False, True, False]),
        (0, torch.tensor([4])),
    ):
        same(pair, part_of, "a", index)


def test_a_slice_iterates(pool: Pool, path: str) -> None:
    same(opened(path), lambda file: [seen(row) for row in file.get_slice("F32.2x3x4")])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_writing_does(pool: Pool, path: str, backend: str) -> None:
    """Reads through one open file share memory (with "mmap"), through two never, and the file stays as it is."""

    def write_and_look(side: Any) -> list[Any]:
        one, other = side(path, "pt", backend=backend), side(path, "pt", backend=backend)
        first, second, part = one.get_tensor("F32.4"), one.get_tensor("F32.4"), one.get_slice("F32.4")[1:]
        first.fill_(7)
        part[0] = 8
        apart = other.get_tensor("F32.4"), other.get_slice("F32.4")[...], side(path, "pt").get_tensor("F32.4")
        again = one.get_slice("F32.4")[...], one.get_tensors()["F32.4"], other.get_tensors()["F32.4"]
        return [*map(seen, (first, second, part, *apart, *again))]

    write(path, {name: one_of_each().tensors[name] for name in ("F32.4", "F32.2x3x4")})

    before = Path(path).read_bytes()
    same(SAFE_OPEN, write_and_look)
    assert Path(path).read_bytes() == before


def test_threads_that_share_an_open_file(pool: Pool, path: str) -> None:
    one_of_each(TORCH_DTYPES).write(path)
    pair = opened(path)
    expected = seen(pair.original.get_tensors())
    with ThreadPoolExecutor(8) as threads:
        for read in [threads.submit(lambda: seen(pair.ours.get_tensors())) for _ in range(32)]:
            assert read.result() == expected


def test_each_tensor_has_its_own_storage(pool: Pool, path: str) -> None:
    file = opened(path).ours
    names = [name for name in file.offset_keys() if name[:2] != "F6"]
    pointers = [safetensors.torch.storage_ptr(file.get_tensor(name)) for name in names]
    nonzero = [pointer for pointer in pointers if pointer]
    assert len(set(nonzero)) == len(nonzero)
    for name in names:
        if name[:2] != "F4":
            assert file.get_tensor(name).untyped_storage().nbytes() == len(one_of_each().tensors[name][2])
    buffer = io.BytesIO()
    torch.save(file.get_tensor("U8.1"), buffer)
    assert len(buffer.getvalue()) < 4096


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.resize_(100),
        lambda tensor: tensor.untyped_storage().resize_(1000),
        lambda tensor: tensor.untyped_storage().resizable(),
        lambda tensor: tensor.detach_(),
        lambda tensor: tensor.share_memory_(),
        lambda tensor: copy.deepcopy(tensor),
        lambda tensor: pickle.loads(pickle.dumps(tensor)),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.requires_grad_().sum().backward(),
        lambda tensor: tensor.numpy().flags.writeable,
        lambda tensor: tensor.set_(torch.zeros(3)),
        lambda tensor: tensor._version,
        lambda tensor: repr(tensor),
    ],
)
@pytest.mark.parametrize("name", ["F32.4", "F32.2x3x4", "F32.scalar"])
def test_what_else_is_done_with_tensors(pool: Pool, path: str, name: str, use: Callable[[torch.Tensor], Any]) -> None:
    same(opened(path), lambda file: use(file.get_tensor(name)))


def test_tensors_and_slices_outlive_their_file(pool: Pool, path: str) -> None:
    one_of_each(TORCH_DTYPES).write(path)

    def keep(side: Any) -> Any:
        with side(path, "pt") as file:
            tensors, part = file.get_tensors(), file.get_slice("F32.2x3x4")
        del file
        return [seen(tensors), seen(part[1]), part.get_shape(), part.get_dtype()]

    assert not isinstance(same(SAFE_OPEN, keep), Failure)


# Files and calls that are refused


class Name(str):
    """A string that hashes and prints like no other."""

    def __hash__(self) -> int:
        return 3

    def __str__(self) -> str:
        return "not " + super().__str__()


class Key(str, Enum):
    ONE = "F32.4"


NAMES: tuple[Any, ...] = (
    "F32.4", "nope", "", "\udcff", "é\n{}", Name("F32.4"), Name("x"), Key.ONE, b"F32.4", None, 3, 1.5, [], {},
    ("F32.4",),
)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES, ids=repr)
@pytest.mark.parametrize("method", ["get_tensor", "get_slice"])
def test_any_name(pool: Pool, path: str, backend: str, name: Any, method: str) -> None:
    pair = opened(path, backend=backend)
    same(pair, lambda file: type(getattr(file, method)(name)).__name__)
    for file in pair:
        file.__exit__(None, None, None)
    assert isinstance(same(pair, lambda file: getattr(file, method)(name)), Failure)


def test_a_closed_file(pool: Pool, path: str) -> None:
    pair = opened(path)
    same(pair, lambda file: file.__enter__() is file)
    same(pair, lambda file: file.__exit__(None, None, None))
    for method in ("keys", "offset_keys", "metadata", "get_tensors"):
        closed = Failure(safetensors.SafetensorError, "File is closed")
        assert same(pair, lambda file, method: getattr(file, method)(), method) == closed
    same(pair, lambda file: file.__enter__() is file)
    same(pair, lambda file: file.__exit__(1, 2, 3))


def test_an_exception_closes_the_file_and_goes_on(pool: Pool, path: str) -> None:
    def fail(side: Any) -> None:
        with side(path, "pt") as file:
            kept.append(file)
            raise KeyError("mine")

    kept: list[Any] = []
    assert same(SAFE_OPEN, fail) == Failure(KeyError, "'mine'")
    same(Pair(*kept), lambda file: file.keys())


DEVICES_ODD: tuple[Any, ...] = (
    "cpu:0", "CPU", "meta", "", "cuda:", "cuda:x", "cuda:1:2", "cuda:-1", "cuda:+1", "cuda:01", "cuda: 1", "cuda:१",
    "mps:1", "cuda\n", "cuda:99999999999999999999", "cpu\udcff", -1, 2**64 - 1, 2**64, 1.0, False, b"cpu", [],
    torch.device("cpu"), torch.device("cuda:0"), Name("cpu"), Name("cuda"),
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES_ODD, ids=repr)
def test_odd_devices(pool: Pool, path: str, device: Any) -> None:
    same(SAFE_OPEN, lambda side: side(path, "pt", device).get_tensor("F32.4"))
    same(SAFE_OPEN, lambda side: side(path, "pt", device).get_slice("F32.4")[0])
    same(SAFE_OPEN, lambda side: side(path, "np", device).get_tensor("F32.4").tolist())


FRAMEWORKS: tuple[Any, ...] = (
    "torch", "pytorch", "pt", "np", "numpy", "tf", "jax", "PT", "", None, 3, b"pt", [], Name("pt"), numpy.zeros(3),
)  # fmt: skip


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=repr)
def test_frameworks(pool: Pool, path: str, framework: Any) -> None:
    same(SAFE_OPEN, lambda side: side(path, framework).keys())
    same(SAFE_OPEN, lambda side: type(side(path, framework).get_tensor("F32.4")).__name__)


def test_other_frameworks_get_the_original(pool: Pool, path: str) -> None:
    assert type(SAFE_OPEN.ours(path, "np")) is safetensors.safe_open
    assert pool.asked == []


@pytest.mark.parametrize("backend", ["mmap", "pread", "MMAP", "", None, 3, b"mmap", [], Name("mmap")], ids=repr)
def test_backends(pool: Pool, path: str, backend: Any) -> None:
    same(SAFE_OPEN, lambda side: side(path, "pt", backend=backend).get_tensor("F32.4"))


class PathLike:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


PATHS: tuple[Callable[[str], Any], ...] = (
    lambda path: path, Path, PathLike, Name, lambda path: path.encode(), lambda path: PathLike(path.encode()),
    lambda path: PathLike(3), lambda path: path + "x", lambda path: os.path.dirname(path), lambda path: path + "/x",
    lambda path: "", lambda path: path + "\0", lambda path: path + "\udcff", lambda path: None, lambda path: 3,
    lambda path: Path("."), lambda path: os.path.relpath(path), lambda path: "file://" + path,
)  # fmt: skip


@pytest.mark.parametrize("make", PATHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_paths(pool: Pool, path: str, make: Callable[[str], Any], backend: str) -> None:
    same(SAFE_OPEN, lambda side: side(make(path), "pt", backend=backend).get_tensor("F32.4"))


def test_a_path_that_is_not_utf8(pool: Pool, path: str) -> None:
    odd = os.fsdecode(os.fsencode(path) + b"\xff")
    os.rename(path, odd)
    for backend in BACKENDS:
        same(SAFE_OPEN, lambda side, backend: side(odd, "pt", backend=backend).get_tensor("F32.4"), backend)


CALLS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((), {}), (("P",), {}), (("P", "pt", "cpu", "mmap"), {}), (("P", "pt", "cpu", "mmap", 1), {}),
    (("P", "pt"), {"foo": 1}),
    (("P", "pt"), {"framework": "pt"}), (("P", "pt"), {"filename": "P"}), ((), {"filename": "P", "framework": "pt"}),
    ((), {"framework": "pt"}), (("P",), {"framework": "pt", "device": "cpu", "backend": "mmap"}),
    (("P", "pt", "cpu"), {"device": "cpu"}), (("nope", "xx", "foo"), {"backend": "bar"}),
    (("nope", "pt", "foo"), {"backend": "bar"}), (("nope", "pt"), {"backend": "bar"}),
)  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs"), CALLS)
def test_calls(pool: Pool, path: str, args: Any, kwargs: Any) -> None:
    args = [path if arg == "P" else arg for arg in args]
    kwargs = {key: path if value == "P" else value for key, value in kwargs.items()}
    same(SAFE_OPEN, lambda side: side(*args, **kwargs).get_tensor("F32.4"))
    same(SAFE_OPEN, lambda side: side.__new__(side, *args, **kwargs).get_tensor("F32.4"))


@pytest.mark.parametrize("method", ["get_tensor", "get_slice", "__exit__"])
@pytest.mark.parametrize("kwargs", [{}, {"nam": "F32.4"}])
def test_missing_arguments_of_methods(pool: Pool, path: str, method: str, kwargs: Any) -> None:
    assert isinstance(same(opened(path), lambda file: getattr(file, method)(**kwargs)), Failure)


# Places where a file is named in another way


def test_by_file_object(pool: Pool, path: str, tmp_path: Path) -> None:
    with open(path, "rb") as file, open(path) as text:
        for handle in (file, text):
            pair = Pair(*(side(handle, "pt") for side in SAFE_OPEN_HANDLE))
            assert type(pair.ours) is SAFE_OPEN_HANDLE.ours
            files_of(pair, one_of_each())
        same(
            SAFE_OPEN_HANDLE,
            lambda side: side(f=file, framework="pt", device="cpu", backend="pread").get_tensor("F32.4"),
        )
        same(SAFE_OPEN_HANDLE, lambda side: side(file, "np").get_tensor("F32.4").tolist())
    same(SAFE_OPEN_HANDLE, lambda side: side(file, "pt").keys())  # closed by now
    with open(os.open(path, os.O_RDONLY), "rb") as nameless:
        for odd in (path, 3, None, io.BytesIO(b"x"), io.StringIO(), nameless):
            same(SAFE_OPEN_HANDLE, lambda side, odd: side(odd, "pt").keys(), odd)


# What the objects look like


def look(object_: Any) -> list[Any]:
    return [
        outcome(lambda: pickle.dumps(object_)),
        outcome(lambda: copy.copy(object_)),
        outcome(lambda: copy.deepcopy(object_)),
        outcome(lambda: setattr(object_, "anything", 1)),
        outcome(lambda: setattr(object_, "get_shape", 1)),
        outcome(lambda: setattr(object_, "keys", 1)),
        outcome(lambda: delattr(object_, "keys")),
        outcome(lambda: object_.anything),
        outcome(lambda: object_ == object_),
        outcome(lambda: object_ == 1),
        outcome(lambda: object_ < object_),
        outcome(lambda: len(object_)),
        outcome(lambda: vars(object_)),
        outcome(lambda: object_()),
        outcome(lambda: object_ + 1),
        outcome(lambda: weakref.ref(object_)),
        outcome(lambda: bool(object_)),
        repr(object_).split(" at ")[0],
        str(object_).split(" at ")[0],
        dir(object_),
        repr(type(object_)),
        type(object_).__name__,
        type(object_).__qualname__,
        type(object_).__module__,
        type(object_).__doc__,
    ]


def test_files_look_alike(pool: Pool, path: str) -> None:
    same(opened(path), look)
    same(opened(path), lambda file: outcome(lambda: iter(file)))
    same(opened(path), lambda file: outcome(lambda: file["F32.4"]))
    same(opened(path), lambda file: outcome(lambda: "F32.4" in file))
    same(opened(path), lambda file: list(inspect.signature(file.get_tensor).parameters))


def test_slices_look_alike(pool: Pool, path: str) -> None:
    pair = Pair(*(file.get_slice("F32.4") for file in opened(path)))
    same(pair, look)
    same(pair, lambda part: type(part)())
    same(pair, lambda part: type("Mine", (type(part),), {}))
    same(pair, lambda part: part.get_shape() is part.get_shape())
    same(pair, lambda part: outcome(lambda: "F32.4" in part))


@pytest.mark.parametrize("pair", [SAFE_OPEN, SAFE_OPEN_HANDLE])
def test_classes_look_alike(pool: Pool, path: str, pair: Pair) -> None:
    same(pair, repr)
    same(pair, lambda side: (side.__name__, side.__qualname__, side.__module__, side.__doc__))
    same(pair, lambda side: str(inspect.signature(side)))
    same(pair, lambda side: type("Mine", (side,), {}))
    same(pair, lambda side: outcome(lambda: pickle.dumps(side)))
    same(pair, lambda side: isinstance(3, side) or issubclass(int, side))
    same(pair, lambda side: isinstance(SAFE_OPEN.original(path, "pt"), side))
    same(pair, lambda side: issubclass(side, side))


def test_instances_of_either_are_instances_of_the_replacement(pool: Pool, path: str) -> None:
    assert isinstance(opened(path).ours, SAFE_OPEN.ours)
    assert isinstance(opened(path).original, SAFE_OPEN.ours)
    assert issubclass(SAFE_OPEN.original, SAFE_OPEN.ours)
    assert not isinstance(opened(path).ours, SAFE_OPEN_HANDLE.ours)


# When there is nothing in memory


def test_what_the_pool_does_not_hold_comes_from_the_original(pool: Pool, path: str) -> None:
    pool.holds = False
    assert type(SAFE_OPEN.ours(path, "pt")) is safetensors.safe_open
    assert pool.asked == [path]


def test_a_fault_in_the_pool_is_one_line_and_no_failure(
    pool: Pool, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.failure = ZeroDivisionError("oops")
    for _ in range(2):
        assert type(SAFE_OPEN.ours(path, "pt")) is safetensors.safe_open
    assert [record.getMessage() for record in caplog.records if record.name == "ballast"] == [
        f"reading {path} without Ballast, because of ZeroDivisionError: oops"
    ]
    monkeypatch.setenv("BALLAST_MODE", "require")
    with pytest.raises(ZeroDivisionError):
        SAFE_OPEN.ours(path, "pt")


def test_a_tensor_that_memory_cannot_give_comes_from_the_file(
    pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(shard: Any, name: str) -> Any:
        raise MemoryError("no address space left")

    pair = opened(path)
    monkeypatch.setattr("tests.safetensors_api.side_by_side.FileShard.tensor", fail)
    files_of(pair, one_of_each())
    same(pair, lambda file: file.get_slice("F32.4")[1:])


def replace(path: str) -> None:
    """Another file, of the same size and with the same names, in the place of this one."""
    names = {name: (dtype, shape, data[::-1]) for name, (dtype, shape, data) in one_of_each().tensors.items()}
    Checkpoint(names, one_of_each().metadata, one_of_each().order, header_padding=3).write(path + ".new")
    os.replace(path + ".new", path)


GONE: dict[str, Callable[[str], None]] = {
    "deleted": os.unlink,
    "renamed": lambda path: os.rename(path, path + ".old"),
    "replaced": replace,
    "elsewhere": lambda path: os.chdir("/"),
    "another there": lambda path: (replace(path), os.chdir("/"))[1],
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gone", GONE)
def test_an_open_file_is_the_same_whatever_becomes_of_its_path(
    pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch, backend: str, gone: str
) -> None:
    monkeypatch.chdir(Path(path).parent)
    pair = opened(Path(path).name, backend=backend)
    with opened(path).original as file:
        truth = seen(file.get_tensor("F32.4"))
    GONE[gone](path)
    files_of(pair, one_of_each())
    slices_of(pair, one_of_each())
    assert same(pair, part_of, "F32.4", ...).storage == truth.storage
    for file in pair:
        file.__exit__(None, None, None)
    same(pair, lambda file: file.get_slice("F32.4"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_more_descriptors_than_the_original_has(pool: Pool, path: str, backend: str) -> None:
    def descriptors(side: Any) -> list[int]:
        before = len(os.listdir("/proc/self/fd"))
        files = [side(path, "pt", backend=backend) for _ in range(9)]
        counts = [len(os.listdir("/proc/self/fd")) - before]
        for file in files[:4]:
            with file:
                outcome(part_of, file, "F32.4", ...), outcome(part_of, file, "F6_E2M3.4", ...)
        counts.append(len(os.listdir("/proc/self/fd")) - before)
        del file, files
        return [*counts, len(os.listdir("/proc/self/fd")) - before]

    assert same(SAFE_OPEN, descriptors) == ([9, 5, 0] if backend == "pread" else [0, 0, 0])


def test_no_descriptor_is_left(pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the original can serve is the original's from the start, and so is its failure to open the file."""

    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(SAFE_OPEN.ours, "original", staticmethod(full))
    with pytest.raises(OSError, match="Too many"):
        SAFE_OPEN.ours(path, "pt", backend="pread")


def test_a_file_replaced_while_it_is_opened(pool: Pool, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_for = pool.shard_for

    def then_replaced(path: str) -> Any:
        try:
            return shard_for(path)
        finally:
            replace(path)

    monkeypatch.setattr(sys.modules["engine_shim.ladder"], "shard_for", then_replaced)
    assert type(SAFE_OPEN.ours(path, "pt", backend="pread")) is safetensors.safe_open


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_another_version_of_the_file_is_mixed_in(pool: Pool, path: str, backend: str) -> None:
    file = opened(path, backend=backend).ours
    with open(path, "r+b") as writer:
        writer.seek(-1, os.SEEK_END)
        writer.write(b"x")
    os.utime(path, ns=(1, 1))
    with pytest.raises(safetensors.SafetensorError, match="has changed since it was opened"):
        file.get_slice("F4.4")


def test_a_path_is_opened_again_only_for_the_same_file(pool: Pool, path: str) -> None:
    one_of_each(PLAIN_DTYPES).write(path)
    file = opened(path).ours
    replace(path)
    with pytest.raises(safetensors.SafetensorError, match="has changed since it was opened"):
        file.get_tensor(3)


@pytest.mark.parametrize("dtypes", [DTYPES, PLAIN_DTYPES], ids=["packed", "plain"])
def test_what_a_later_safetensors_can_do_more(pool: Pool, path: str, dtypes: Any) -> None:
    from engine_shim.safe_open import stand_in

    one_of_each(dtypes).write(path)

    class Later:
        def __init__(self, *args: Any) -> None:
            self.file: Any = safetensors.safe_open(*args)

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def shuffled_keys(self) -> Any:
            return self.file.keys()[::-1]

    file = stand_in(Later)(path, "pt")
    assert not isinstance(file, Later)
    assert file.shuffled_keys() == file.keys()[::-1]
    file.__exit__(None, None, None)
    with pytest.raises(safetensors.SafetensorError, match="File is closed"):
        file.shuffled_keys()
