"""What the engines of these tests do: read weights in every way there is, say what they got, write into it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import safetensors
import safetensors.torch
import torch

import engine_shim
from tests.never_wrong.forked import KEPT


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Type, shape and bits of each, short enough to be sent."""
    found = {}
    for name, tensor in tensors.items():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    return found


def names(file: Any) -> list[str]:
    found: list[str] = file.keys()
    return found


def by_safe_open(path: str) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in names(file)}


def by_slices(path: str) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_slice(name)[...] for name in names(file)}


def by_load_file(path: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def by_load_model(path: str) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        module = Plain({name: torch.empty_like(file.get_tensor(name)) for name in names(file)})
    missing, unexpected = safetensors.torch.load_model(module, path)
    assert not missing and not unexpected
    return module.state_dict()


def by_open(model: str) -> dict[str, torch.Tensor]:
    return engine_shim.open(model).state_dict()


def by_attach(model: str) -> dict[str, torch.Tensor]:
    empty = {name: torch.empty_like(value, device="meta") for name, value in engine_shim.open(model).tensors.items()}
    return engine_shim.attach(Plain(empty), model).state_dict()


class Plain(torch.nn.Module):
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


FILE_WAYS = {"safe_open": by_safe_open, "slices": by_slices, "load_file": by_load_file, "load_model": by_load_model}
MODEL_WAYS = {"open": by_open, "attach": by_attach}


def load(way: str, what: str, keep: str = "") -> dict[str, str]:
    """Loads a file or a model in this way and says what it got; keeps the tensors under a name if asked to."""
    tensors = (FILE_WAYS.get(way) or MODEL_WAYS[way])(what)
    if keep:
        KEPT[keep] = tensors
    return fingerprints(tensors)


def kept(name: str) -> dict[str, str]:
    """What was kept, as it is now."""
    return fingerprints(KEPT[name])


def forget(name: str) -> None:
    del KEPT[name]


def scribble(name: str) -> dict[str, str]:
    """Writes into every byte of what was kept, as an engine may do with its own weights."""
    for tensor in KEPT[name].values():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        whole.bitwise_not_()
    return kept(name)


def segments() -> dict[str, int]:
    """The segments that this process has mapped, and how many bytes of them it has made its own."""
    found: dict[str, int] = {}
    current: str | None = None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and len(words) >= 5 and ":" not in words[0]:
                place = words[5] if len(words) > 5 else ""
                current = os.path.basename(place) if "/ballast-" in place else None
                if current is not None:
                    found.setdefault(current, 0)
            elif current is not None and words[0] == "Anonymous:":  # copied on writing
                found[current] = max(found[current], 1024 * int(words[1]))
    return found


def take_descriptors(pool: str, put: str) -> int:
    """As a program that becomes a daemon: closes every descriptor of the pool's objects, which it does not know, and opens the
    file `put` of its own until it has all these numbers. Says how many."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if f"/ballast-{pool}." in os.readlink(f"/proc/self/fd/{name}"):
                numbers.append(int(name))
        except OSError:
            continue  # that of the directory
    own = os.open(put, os.O_RDWR)
    for number in numbers:
        os.dup2(own, number, inheritable=False)
    KEPT["own"] = numbers
    return len(numbers)


def own_descriptors(put: str) -> int:
    """How many of these are still what the program has opened."""
    there = [number for number in KEPT["own"] if os.path.exists(f"/proc/self/fd/{number}")]
    return sum(os.readlink(f"/proc/self/fd/{number}") == put for number in there)


def environment(**changes: str) -> None:
    os.environ.update(changes)


def settings(changes: dict[str, str]) -> None:
    os.environ.update(changes)


def become(user: int) -> None:
    """Another user from now on."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def attempt(way: str, what: str) -> Any:
    """The error in which loading ends, as its type's name and its text, or None."""
    try:
        load(way, what)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def load_in_threads(paths: list[str]) -> list[dict[str, str]]:
    with ThreadPoolExecutor(8) as executor:
        return list(executor.map(lambda path: fingerprints(by_safe_open(path)), paths))


def open_for(seconds: float, model: str) -> tuple[int, list[dict[str, str]]]:
    """Opens a model again and again, reading all of it; says how often, and everything that it got."""
    deadline = time.monotonic() + seconds
    count, seen = 0, {}
    while time.monotonic() < deadline:
        with engine_shim.open(model) as opened:
            found = fingerprints(opened.tensors)
        seen[json.dumps(found, sort_keys=True)] = found
        count += 1
    return count, list(seen.values())


def fork_and_load(path: str) -> tuple[int, dict[str, str]]:
    """A worker, forked after this process has attached, loads the file again, keeps it and sleeps; what it got."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = load("safe_open", path, "in the child")
            os.write(writing, json.dumps(found).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    told = os.read(reading, 1 << 16)
    os.close(reading)
    return pid, json.loads(told or b"{}")
