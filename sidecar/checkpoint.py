"""A checkpoint on disk, as far as its headers tell: which files, which tensors, where their bytes are.

First station of a tensor's way (checkpoint → loader → pool → manifest → mapping). Nothing here reads tensor data, and
everything that can be wrong with a checkpoint before its data is read is refused here, in one sentence with the remedy.

    checkpoint = open_checkpoint("/models/llama")
    for shard in checkpoint.shards:
        for tensor in shard.tensors:       # in the order of the file's header
            ...                            # bytes at shard.data_begin + tensor.begin, tensor.nbytes of them

Source for the format: `read_metadata` and `Metadata::validate` of safetensors 0.8 (safetensors/src/tensor.rs). What
that refuses is refused here, what it accepts is accepted, with two exceptions that no writer needs: a header that names
one tensor twice (there the last counts), and extents above MAX_EXTENT. The tests compare the two.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import posixpath
import re
import stat as stat_modes
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from engine_shim.handoff.dtypes import BITS
from engine_shim.handoff.identity import Stat, digest

LENGTH_BYTES = 8  # the header's length, little-endian, before the header
MAX_HEADER = 100_000_000  # MAX_HEADER_SIZE of safetensors
MAX_NUMBER = 2**64 - 1  # shapes, offsets and their products are `usize` there
MAX_EXTENT = (
    2**62 - 1
)  # what a manifest holds; safetensors takes more beside an extent of 0, torch none above 2**63 - 1
MAX_DEPTH = 127  # containers within containers that serde_json reads
MINUS_ZERO = re.compile(rb"[\[,:\s]-0")
MAX_INDEX = 512 << 20  # bytes; an index of a million tensors has about 100 MB
MAX_CONFIG = 64 << 20  # bytes; a config.json has a few thousand

# The names that the Hugging Face libraries look for when no variant (fp16, …) is asked for.
PLAIN_STEMS = ("model", "diffusion_pytorch_model")
# transformers puts a variant before the last suffix (model.safetensors.index.fp16.json), diffusers also after the stem.
INDEX = re.compile(r"(?P<stem>.+)\.safetensors\.index(?:\.[^.]+)?\.json\Z")
VARIANT = re.compile(rf"(?P<stem>{'|'.join(PLAIN_STEMS)})\.[^.]+\Z")

# One of several files, by its name alone: where no index says so, the name says how many there are.
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.safetensors\Z")

# What downloaders keep beside a file that they write in place, and what they call one that is not whole yet.
IN_PLACE = (".aria2", ".st")  # aria2, axel
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download")
LATER = "it is loaded when the download is finished (if none is running, start it again)"

# Small files beside the weights that say what the weights mean; tokenizers and generation settings do not.
CONFIGS = (
    "config.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "model_index.json",
    "modular_model_index.json",
    "modules.json",
    "params.json",
    "quant_config.json",
    "quantization_config.json",
    "quantize_config.json",
)
PIPELINE_INDEXES = ("model_index.json", "modular_model_index.json")  # diffusers
MODULES = "modules.json"  # sentence_transformers

AGAIN = "download or save it again"
TOO_DEEP = f"has a header nested more than {MAX_DEPTH} deep; {AGAIN}"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FOREIGN = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the weights; run `git lfs pull` in its repository"),
    (b"GGUF", "is a GGUF file; load it with transformers (gguf_file=…), then save_pretrained makes safetensors of it"),
    (b"PK\x03\x04", "is a pickled or zip file; convert it with safetensors.torch.save_file"),
    (b"\x80", "is a pickled file; convert it with safetensors.torch.save_file"),
    (b"\x89HDF", "is an HDF5 file; convert it with safetensors.torch.save_file"),
    (b"<", "is a web page or XML; download the weights again"),
    (b"{", "is JSON; give the .safetensors file or its directory"),
)


class CheckpointError(Exception):
    """The checkpoint cannot be served. One sentence: which file or tensor, what is wrong, what to do."""


class _Refused(Exception):
    """The same within one file, whose name is still to be put before it."""


class TensorEntry(NamedTuple):  # not a dataclass: there may be a million, and this is made three times as fast
    """One tensor of a header. `begin` and `end` are byte offsets within the file's data area.

    `shape` counts elements, for packed types too: F4 of shape (8,) has 4 bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Shard:
    """One file. `header_len` counts the JSON with its padding, without the 8 bytes of length before it."""

    name: str  # relative to the checkpoint's root, as an index or a listing spells it
    path: Path  # where it was found
    real: Path  # with all symbolic links resolved
    size: int
    header_len: int
    header_digest: str  # blake2b, 16 bytes, hexadecimal, of everything before the data area
    metadata: dict[str, str] | None
    tensors: tuple[TensorEntry, ...]  # in the order of the header
    stat: Stat
    component: str = ""  # the folder within the checkpoint that has its own tensor names ("unet"); "" is the top

    @property
    def data_begin(self) -> int:
        """Byte offset of the data area in the file."""
        return LENGTH_BYTES + self.header_len

    @property
    def nbytes(self) -> int:
        """Bytes of the data area; the tensors cover it without holes."""
        return self.size - self.data_begin


@dataclass(frozen=True)
class Checkpoint:
    """All files that one model is served from. A tensor name is unique within its shards' `component`."""

    path: Path  # as given, made absolute
    root: Path  # the directory that shards' and configs' names are relative to
    name: str  # the model's name in the pool
    shards: tuple[Shard, ...]
    config: Mapping[str, str]  # relative name of a companion file → blake2b, 16 bytes, hexadecimal, of its content
    notes: tuple[str, ...] = ()  # decisions that a person should hear of, a sentence each

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    @property
    def tensor_count(self) -> int:
        return sum(len(shard.tensors) for shard in self.shards)


def open_checkpoint(path: str | os.PathLike[str], name: str | None = None) -> Checkpoint:
    """Read the headers of the checkpoint at `path`: a directory, one .safetensors file, or an index file.

    Which files of a directory belong to it:
      - an index (`model.safetensors.index.json`) wins: the files that it names, no others;
      - without one, all `*.safetensors`, save variants (`model.fp16.safetensors`) beside their plain file;
      - a diffusers pipeline (`model_index.json`) and a sentence_transformers model (`modules.json`) also have the
        folders that those files name; each is a component with its own index and its own tensor names.

    Raises CheckpointError.
    """
    path = Path(os.path.abspath(path))
    if not _is_text(str(path)):
        raise CheckpointError(f"{_show(path)} is not UTF-8, as a path has to be to stand in a manifest; rename it")
    mode = _stat(path).st_mode
    if stat_modes.S_ISDIR(mode):
        root = path
        parts = [_part(root, component) for component in _components(root)]
    elif INDEX.match(path.name):
        root = path.parent
        parts = [_part(root, "", path.name)]
    else:
        root = path.parent
        parts = [_Part("", (path.name,))]
    shards = tuple(shard for part in parts for shard in _read_part(root, part))
    notes = tuple(note for part in parts for note in part.notes)
    config = _config_digests(root, [part.component for part in parts])
    return Checkpoint(path, root, name or default_name(path), shards, config, notes)


def default_name(path: Path) -> str:
    """What a checkpoint is called if nobody says: its repository in the Hugging Face cache, else its folder or file."""
    for parent in (path, *path.parents):
        if parent.parent.name == "snapshots" and parent.parent.parent.name.startswith("models--"):
            below = path.relative_to(parent).parts
            if below and _is_weights(below[-1]):
                below = below[:-1] + _stem(below[-1])
            return "/".join((parent.parent.parent.name.removeprefix("models--").replace("--", "/"), *below))
    if _is_weights(path.name):
        return (_stem(path.name) or (path.parent.name,))[0]
    return path.name


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") or bool(INDEX.match(name))


def _stem(name: str) -> tuple[str, ...]:
    """What a file's name adds to its folder's: nothing, where every model's file has that name."""
    index = INDEX.match(name)
    stem = index["stem"] if index else name.removesuffix(".safetensors")
    return () if stem in (*PLAIN_STEMS, "adapter_model", "consolidated") else (stem,)


# Which files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The files of one component, relative to it, and what its index says of their tensors."""

    component: str
    files: tuple[str, ...]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None  # tensor → one of `files`
    notes: tuple[str, ...] = ()


def _components(root: Path) -> list[str]:
    """The folders of the checkpoint that hold weights, "" for `root` itself."""
    names = _list(root)
    for index in PIPELINE_INDEXES:
        if index in names:
            described = _json(root / index, MAX_CONFIG)
            if not isinstance(described, dict):
                raise CheckpointError(f"{_show(root / index)} is not a JSON object; {AGAIN}")
            found = [name for name in names if name in described and _is_text(name) and _has_weights(root / name)]
            if found:
                return found
    found = [""] if any(map(_is_weights, names)) else []
    if MODULES in names:
        modules = _json(root / MODULES, MAX_CONFIG)
        for module in modules if isinstance(modules, list) else []:
            folder = module.get("path") if isinstance(module, dict) else None
            if isinstance(folder, str) and folder:
                folder = _inside(root / MODULES, folder)
                if folder not in (".", *found) and _has_weights(root / folder):
                    found.append(folder)
    if not found:
        raise CheckpointError(_why_nothing(root, names))
    return found


def _has_weights(folder: Path) -> bool:
    return os.path.isdir(folder) and any(map(_is_weights, _list(folder)))


def _part(root: Path, component: str, index: str | None = None) -> _Part:
    """The files of `component`; `index` where a person chose one."""
    folder = root / component
    names = _list(folder)
    files = tuple(name for name in names if name.endswith(".safetensors"))
    index = index or _choose_index(folder, names)
    if index:
        weight_map = _weight_map(folder / index)
        served = tuple(sorted(set(weight_map.values())))
        why = f"which {index} does not name"
    else:
        weight_map = None
        served = tuple(name for name in files if not _is_variant(name.removesuffix(".safetensors"), files))
        why = "a variant that engines read only if asked for"
        _refuse_unfinished(folder, names, served)
    extra = sorted(set(files).difference(served))
    note = f"{_show(folder)} also holds {_some(extra)}, {why}; give the file itself to serve it from memory"
    return _Part(component, served, index, weight_map, (note,) if extra else ())


def _refuse_unfinished(folder: Path, names: list[str], served: Iterable[str]) -> None:
    """Without an index: refuse files that are, by their names, not all of the model's yet."""
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix in UNFINISHED and stem.endswith(".safetensors") and stem not in names:
            raise CheckpointError(f"{_show(folder / name)} is not downloaded to the end; {LATER}")
    series = Counter((found["stem"], found["count"]) for found in map(NUMBERED.match, served) if found)
    for (stem, count), present in series.items():  # some count from 0
        if present < int(count):
            raise CheckpointError(
                f"{_show(folder)} holds {present} of {int(count)} files called {_quote(stem)}-…-of-{count}.safetensors; {LATER}"
            )


def _choose_index(folder: Path, names: list[str]) -> str | None:
    """The index that an engine reads unless told of a variant; None: there is none, and files speak for themselves."""
    for stem in PLAIN_STEMS:
        if f"{stem}.safetensors.index.json" in names:
            return f"{stem}.safetensors.index.json"
    indexes = []
    for name in names:
        found = INDEX.match(name)
        if found:
            stem = found["stem"] if name.endswith(".safetensors.index.json") else f"{found['stem']}.variant"
            if not _is_variant(stem, names):
                indexes.append(name)
    if len(indexes) > 1:
        raise CheckpointError(f"{_show(folder)} holds several indexes ({_some(indexes)}); give one of them as the path")
    return indexes[0] if indexes else None


def _is_variant(stem: str, names: Iterable[str]) -> bool:
    """Whether `stem` (`model.fp16`) is a variant of a file among `names` (`model.safetensors`)."""
    found = VARIANT.match(stem)
    return found is not None and f"{found['stem']}.safetensors" in names


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor → file, from an index; paths normalised and known to stay in the index's folder."""
    described = _json(index, MAX_INDEX)
    weight_map = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{_show(index)} has no weight_map (tensor name → file name); {AGAIN}")
    inside: dict[Any, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{_show(index)} gives no file name for tensor {_quote(tensor)}; {AGAIN}")
        if file not in inside:
            inside[file] = _inside(index, file)
    return {tensor: inside[file] for tensor, file in weight_map.items()}


def _inside(source: Path, name: str) -> str:
    """`name`, a relative path that `source` holds, normalised; refused if it leads out of `source`'s folder."""
    # Symbolic links may lead out (the Hugging Face cache is made of them): the owner set them, not the file's author.
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/") or not _is_text(name):
        raise CheckpointError(
            f"{_show(source)} names the path {_quote(name)}, which is not one within its own folder; "
            "correct it, and do not trust where it came from"
        )
    return posixpath.normpath(name)


def _read_part(root: Path, part: _Part) -> list[Shard]:
    """The headers of a component's files, compared with each other and with the index."""
    prefix = f"{part.component}/" if part.component else ""
    shards = []
    for file in part.files:
        path = root / part.component / file
        if part.index and not os.path.lexists(path):
            raise CheckpointError(
                f"{_show(root / part.component / part.index)} names {_quote(file)}, which is missing; "
                "finish the download, or restore the file"
            )
        for mark in IN_PLACE:
            if os.path.lexists(f"{path}{mark}"):
                raise CheckpointError(f"{_show(path)} is being written by a downloader ({_quote(file + mark)}); {LATER}")
        shards.append(read_header(path, prefix + file, part.component))
    where: dict[str, str] = {}
    for file, shard in zip(part.files, shards, strict=True):
        where.update(dict.fromkeys((tensor.name for tensor in shard.tensors), file))
    if len(where) < sum(len(shard.tensors) for shard in shards):
        raise CheckpointError(_duplicate(root / part.component, part.files, shards))
    if part.weight_map is not None and part.index:
        _compare(root / part.component / part.index, part.weight_map, where)
    return shards


def _duplicate(folder: Path, files: tuple[str, ...], shards: list[Shard]) -> str:
    times = Counter(tensor.name for shard in shards for tensor in shard.tensors)
    name, count = times.most_common(1)[0]
    holders = [
        file for file, shard in zip(files, shards, strict=True) if any(tensor.name == name for tensor in shard.tensors)
    ]
    return (
        f"{_show(folder)}: tensor {_quote(name)} is in {count} files ({_some(holders)}), and which one counts is not "
        "said; move away the files that do not belong to the model, or give one file, or add an index"
    )


def _compare(index: Path, weight_map: Mapping[str, str], where: Mapping[str, str]) -> None:
    """Refuse an index that does not describe its files. They may hold tensors that it does not name."""
    for tensor, file in weight_map.items():
        if where.get(tensor) != file:
            found = f"{_quote(where[tensor])} holds" if tensor in where else "no file holds"
            raise CheckpointError(
                f"{_show(index)} says that tensor {_quote(tensor)} is in {_quote(file)}, but {found} it; "
                "the index and the files are of different versions: download all of them again"
            )


def _why_nothing(root: Path, names: list[str]) -> str:
    """The sentence for a directory without safetensors, by what else lies there."""
    shown = _show(root)
    pickles = [name for name in names if name.endswith(PICKLES)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if "snapshots" in names and "blobs" in names:
        return f"{shown} is a repository of the Hugging Face cache; give one of its snapshots, {shown}/snapshots/…"
    folders = [name for name in names if any((root / name).glob("*.safetensors"))]
    if folders:
        return f"{shown} itself holds no .safetensors file, but its folders do; give one of them ({_some(folders)})"
    if pickles:
        return (
            f"{shown} holds only pickled weights ({_some(pickles)}), which are never opened here because unpickling "
            "runs code; if you trust them, convert them once: python -c 'from transformers import "
            'AutoModelForCausalLM as M; M.from_pretrained("FROM").save_pretrained("TO")\''
        )
    if ggufs:
        return (
            f"{shown} holds only GGUF ({_some(ggufs)}), and Ballast serves safetensors; convert it once: python -c "
            "'from transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("FROM", gguf_file="{_some(ggufs[:1])}").save_pretrained("TO")\''
        )
    return f"{shown} holds no .safetensors file; finish the download, or give the directory that holds the weights"


def _config_digests(root: Path, components: Iterable[str]) -> dict[str, str]:
    digests = {}
    for component in dict.fromkeys(("", *components)):
        present = set(_list(root / component))
        for name in CONFIGS:
            if name in present:
                content = _read(root / component / name, MAX_CONFIG)
                digests[posixpath.join(component, name)] = digest(content)
    return digests


# One file --------------------------------------------------------------------------------------------------------


def read_header(path: str | os.PathLike[str], name: str | None = None, component: str = "") -> Shard:
    """Read and check the header of one safetensors file, called `name` in its checkpoint. Raises CheckpointError."""
    path = Path(path)
    fd = _open(path)
    try:
        before = Stat.of(os.fstat(fd))
        head = _header_bytes(fd, before.size)
        if Stat.of(os.fstat(fd)) != before:
            raise _Refused("changed while it was read; try again when it is written to the end")
        metadata, tensors = parse_header(head[LENGTH_BYTES:], before.size - len(head))
    except _Refused as refused:
        raise CheckpointError(f"{_show(path)} {refused}") from None
    except OSError as error:
        raise _os_error(path, error) from error
    finally:
        os.close(fd)
    return Shard(
        name=path.name if name is None else name,
        path=path,
        real=Path(os.path.realpath(path)),
        size=before.size,
        header_len=len(head) - LENGTH_BYTES,
        header_digest=digest(head),
        metadata=metadata,
        tensors=tensors,
        stat=before,
        component=component,
    )


def _header_bytes(fd: int, size: int) -> bytes:
    """The bytes before the data area of a file of `size` bytes."""
    if size == 0:
        raise _Refused(f"is empty; {AGAIN}")
    start = _pread(fd, min(size, 64), 0)
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if size < LENGTH_BYTES:
        raise _Refused(f"is cut off after {size} bytes, within the header's length; {AGAIN}")
    if length > MAX_HEADER:
        for magic, sentence in FOREIGN:
            if start.startswith(magic):
                raise _Refused(sentence)
        raise _Refused(
            f"has a header of {length} bytes, more than the {MAX_HEADER} that safetensors allows, "
            f"so it is damaged or no safetensors file; {AGAIN}"
        )
    if LENGTH_BYTES + length > size:
        raise _Refused(f"is cut off within its header ({length} bytes, {size - LENGTH_BYTES} are there); {AGAIN}")
    return _pread(fd, LENGTH_BYTES + length, 0)


def parse_header(header: bytes, data_bytes: int) -> tuple[dict[str, str] | None, tuple[TensorEntry, ...]]:
    """Metadata and tensors of a header (the JSON alone) in front of `data_bytes` bytes; raises _Refused."""
    collecting = gc.isenabled()
    gc.disable()  # no cycles are made here, and looking for them among a million new objects takes as long as the work
    try:
        metadata, tensors = _plain(header) or _peculiar(header)
        _check_layout(tensors, data_bytes)
        return metadata, tuple(tensors)
    finally:
        if collecting:
            gc.enable()


def _plain(header: bytes) -> tuple[dict[str, str] | None, list[TensorEntry]] | None:
    """What the header says, if it is written as every known writer does and so orjson has kept all of it.

    orjson keeps the last of several equal keys and says nothing. But every key in the text has one colon outside of
    strings, so if no key is lost, then the colons in the text are those of the keys kept plus those in strings kept.
    """
    try:
        root = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        reason = error.msg.split(":")[0] if header else "it is empty"
        raise _Refused(f"has a header that is not JSON ({reason}); {AGAIN}") from None
    if b"\\u003" in header or (b"-0" in header and MINUS_ZERO.search(header)):
        return None  # an escaped colon would be miscounted; orjson reads -0 as the integer 0, serde_json as a float
    if type(root) is not dict:
        return None
    metadata = root.pop("__metadata__", None)
    colons = 4 * len(root) + "".join(root).count(":")
    if type(metadata) is dict:
        texts = [*metadata, *metadata.values()]
        if not all(type(text) is str for text in texts):
            return None
        colons += 1 + len(metadata) + "".join(texts).count(":")
    elif metadata is not None:
        return None
    if header.count(b":") != colons:
        return None
    tensors = []
    for name, info in root.items():
        if type(info) is not dict or len(info) != 3:
            return None
        try:
            dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        except KeyError:
            return None
        if type(dtype) is not str:
            return None
        tensors.append(_entry(name, dtype, shape, offsets))
    return metadata, tensors


class _Object(list[tuple[str, Any]]):
    """A JSON object with all its keys, equal ones too."""


def _peculiar(header: bytes) -> tuple[dict[str, str] | None, list[TensorEntry]]:
    """The same for any header that serde accepts: with unknown fields, tensors as [dtype, shape, offsets], and so on.

    Sees equal keys. Several times slower than `_plain`. `header` is JSON: orjson has read it.
    """

    def number(text: str) -> int | float:
        value = int(text)
        return value if text != "-0" and -(2**63) <= value <= MAX_NUMBER else float(text)

    try:
        root = json.loads(header.decode(), object_pairs_hook=_Object, parse_int=number)
    except RecursionError:
        raise _Refused(TOO_DEEP) from None
    if not isinstance(root, _Object):
        raise _Refused(f"has a header that is not a JSON object; {AGAIN}")
    if _deeper(root, MAX_DEPTH):
        raise _Refused(TOO_DEEP)
    metadata: dict[str, str] | None = None
    tensors: dict[str, TensorEntry] = {}
    seen = False
    for name, value in root:
        if name != "__metadata__":
            if name in tensors:
                raise _Refused(f"has tensor {_quote(name)} twice in its header; {AGAIN}")
            tensors[name] = _entry(name, *_fields(name, value))
            continue
        if seen:
            raise _Refused(f"has two __metadata__ in its header; {AGAIN}")
        seen = True
        if value is not None:
            if not isinstance(value, _Object) or not all(isinstance(text, str) for _, text in value):
                raise _Refused(f"has a __metadata__ that is not an object of strings; {AGAIN}")
            metadata = dict(value)
    return metadata, list(tensors.values())


def _fields(name: str, value: Any) -> tuple[Any, Any, Any]:
    """dtype, shape and offsets of a tensor, in either of the two ways in which serde reads a struct."""
    if isinstance(value, _Object):
        found: dict[str, Any] = {}
        for key, item in value:
            if key in ("dtype", "shape", "data_offsets"):
                if key in found:
                    raise _Refused(f"gives {key} of tensor {_quote(name)} twice; {AGAIN}")
                found[key] = item
        if len(found) < 3:
            raise _Refused(f"lacks dtype, shape or data_offsets for tensor {_quote(name)}; {AGAIN}")
        dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
    elif isinstance(value, list) and len(value) == 3:
        dtype, shape, offsets = value
    else:
        raise _Refused(f"has something else than a tensor's description for {_quote(name)}; {AGAIN}")
    if isinstance(dtype, _Object) and len(dtype) == 1 and dtype[0][1] is None:
        dtype = dtype[0][0]  # {"F32": null}: the long form of a variant without content
    return dtype, shape, offsets


def _deeper(value: Any, limit: int) -> bool:
    """Whether lists and objects in `value` are nested more than `limit` deep."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for container in level
            if isinstance(container, list)
            for item in ((pair[1] for pair in container) if isinstance(container, _Object) else container)
            if isinstance(item, list)
        ]
        if not level:
            return False
    return True


def _entry(name: str, dtype: Any, shape: Any, offsets: Any) -> TensorEntry:
    """The tensor, if its own numbers agree with each other."""
    bits = BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise _Refused(
            f"has tensor {_quote(name)} of the unknown dtype {_quote(dtype)}; "
            "save it in a dtype of safetensors 0.8, or look for a newer Ballast"
        )
    if type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        raise _Refused(f"has a malformed shape or data_offsets for tensor {_quote(name)}; {AGAIN}")
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise _Refused(f"has data_offsets for tensor {_quote(name)} that are no range of bytes; {AGAIN}")
    elements = 1
    for extent in shape:
        if type(extent) is not int or not 0 <= extent <= MAX_EXTENT:
            raise _Refused(f"has a shape for tensor {_quote(name)} that is not made of possible numbers; {AGAIN}")
        elements *= extent
        if elements > MAX_NUMBER:
            break  # at each step, so that [2**64 - 1, 2, 0] is refused as it is by safetensors
    bits *= elements
    if bits > MAX_NUMBER:
        raise _Refused(f"has a shape for tensor {_quote(name)} that overflows 64 bits; {AGAIN}")
    if bits & 7:
        raise _Refused(f"has tensor {_quote(name)} of packed {dtype} that does not end on a whole byte; {AGAIN}")
    if bits >> 3 != end - begin:
        raise _Refused(
            f"has tensor {_quote(name)}, whose dtype and shape make {bits >> 3} bytes and whose data_offsets "
            f"{end - begin}; {AGAIN}"
        )
    return TensorEntry(name, sys.intern(dtype), tuple(shape), begin, end)


def _check_layout(tensors: list[TensorEntry], data_bytes: int) -> None:
    """Refuse holes, overlaps, and a data area of another size than `data_bytes`."""
    place = 0
    for tensor in sorted(tensors, key=attrgetter("begin", "end")):
        if tensor.begin != place:
            what = "overlaps the one before it" if tensor.begin < place else f"leaves a hole from byte {place} on"
            raise _Refused(
                f"has tensor {_quote(tensor.name)} at bytes {tensor.begin} to {tensor.end}, which {what}; {AGAIN}"
            )
        place = tensor.end
    if place > data_bytes:
        raise _Refused(f"is cut off (its header promises {place} bytes of tensors, {data_bytes} are there); {AGAIN}")
    if place < data_bytes:
        raise _Refused(f"has {data_bytes - place} bytes behind its last tensor; {AGAIN}")


# Files, and words for what is wrong with them --------------------------------------------------------------------


def _stat(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except (OSError, ValueError) as error:
        raise _os_error(path, error) from error


def _open(path: Path) -> int:
    """A descriptor of a regular file. Never waits: opening a FIFO would, and opening a device may do anything."""
    if stat_modes.S_ISREG(_stat(path).st_mode):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _os_error(path, error) from error
        if stat_modes.S_ISREG(os.fstat(fd).st_mode):  # it may have been replaced between the two calls
            return fd
        os.close(fd)
    kind = "a directory" if os.path.isdir(path) else "a pipe, socket or device"
    raise CheckpointError(f"{_show(path)} is {kind}, not a regular file; put the file itself there")


def _pread(fd: int, length: int, offset: int) -> bytes:
    """Exactly `length` bytes."""
    pieces = []
    while length:
        piece = os.pread(fd, length, offset)
        if not piece:
            raise _Refused("became shorter while it was read; try again when it is written to the end")
        pieces.append(piece)
        offset += len(piece)
        length -= len(piece)
    return b"".join(pieces)


def _read(path: Path, limit: int) -> bytes:
    """A small file as a whole."""
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise _Refused(f"has {size} bytes, more than the {limit} that such a file may have; {AGAIN}")
        return _pread(fd, size, 0)
    except _Refused as refused:
        raise CheckpointError(f"{_show(path)} {refused}") from None
    except OSError as error:
        raise _os_error(path, error) from error
    finally:
        os.close(fd)


def _json(path: Path, limit: int) -> Any:
    content = _read(path, limit)
    try:
        return json.loads(content)  # as lenient as the engines are, which read it with the same parser
    except (ValueError, RecursionError):
        for magic, sentence in FOREIGN[:1]:
            if content.startswith(magic):
                raise CheckpointError(f"{_show(path)} {sentence}") from None
        raise CheckpointError(f"{_show(path)} is not JSON; {AGAIN}") from None


def _list(folder: Path) -> list[str]:
    """The names in a folder, sorted, without hidden ones (partial downloads, other systems' droppings)."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise _os_error(folder, error) from error
    for name in names:
        if _is_weights(name) and not _is_text(name):
            raise CheckpointError(f"{_show(folder / name)} has a name that is not UTF-8; rename it")
    return names


def _os_error(path: Path, error: OSError | ValueError) -> CheckpointError:
    shown = _show(path)
    code = error.errno if isinstance(error, OSError) else errno.ENOENT
    if code == errno.ENOENT and os.path.islink(path):
        target = _show(Path(os.path.realpath(path)))
        return CheckpointError(
            f"{shown} is a symbolic link to {target}, which is missing (an unfinished download?); download it again"
        )
    if code in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointError(
            f"{shown} does not exist; give a checkpoint's directory or a .safetensors file "
            "(a model on a hub must be downloaded first: hf download OWNER/NAME)"
        )
    if code == errno.ELOOP:
        return CheckpointError(f"{shown} is a loop of symbolic links; download it again, or link it to the file")
    if code in (errno.EACCES, errno.EPERM):
        return CheckpointError(
            f"{shown} may not be read by user {os.geteuid()}; allow it (chmod a+r, and a+x for directories above), "
            "or run Ballast as its owner"
        )
    if code in (errno.EMFILE, errno.ENFILE):
        return CheckpointError(f"{shown} cannot be opened: too many open files; raise the limit (ulimit -n)")
    return CheckpointError(f"{shown} cannot be read ({os.strerror(code or 0)}); check the disk or mount and try again")


def _is_text(name: str) -> bool:
    """Whether a name can be written as UTF-8; what the file system has otherwise comes as lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)


def _quote(text: Any) -> str:
    """A name that a file's author chose, short and harmless on a terminal."""
    shown = repr(text)
    return shown if len(shown) <= 120 else f"{shown[:80]}…{shown[-20:]}"


def _some(names: list[str]) -> str:
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
