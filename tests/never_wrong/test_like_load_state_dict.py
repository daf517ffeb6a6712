"""A checkpoint's tensors in a module are what `load_state_dict` would have made of them, or the module is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import engine_shim
from engine_shim import modules
from engine_shim.handoff.errors import Mismatch
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong.bits import look
from tests.never_wrong.loading import Loading
from tests.never_wrong.test_wrapped import Scaled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "m"
    path.mkdir()
    return path


@pytest.fixture
def linear(filled: Loading, folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """A checkpoint of a Linear(64, 64) in the pool, as safetensors reads it."""
    Checkpoint({"weight": entry("F32", (64, 64), 1), "bias": entry("F32", (64,), 2)}).write(folder / "model.safetensors")
    filled.load(folder)
    yield safetensors.torch.load_file(folder / "model.safetensors")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)


def all_of(module: nn.Module) -> dict[str, Any]:
    return {slot.label: (id(slot.tensor), look(slot.tensor.detach())) for slot in modules.slots(module)}


def view() -> Any:
    module: Any = nn.Linear(64, 64)
    module.turned = module.weight.detach().t()
    return module


def buffer() -> nn.Module:
    module = nn.Linear(64, 64)
    module.register_buffer("upper", module.weight.detach()[:32], persistent=False)
    return module


def other_order() -> nn.Module:
    module = nn.Linear(64, 64)
    module.weight = nn.Parameter(torch.rand(64, 64).t())
    return module


def one_memory() -> nn.Module:
    module = nn.Linear(64, 64)
    whole = torch.rand(65 * 64)
    module.weight, module.bias = nn.Parameter(whole[: 64 * 64].view(64, 64)), nn.Parameter(whole[64 * 64 :])
    return module


def numpys() -> nn.Module:
    """Two storages over the same bytes."""
    module = nn.Linear(64, 64)
    array = torch.rand(64, 64).numpy()
    module.weight = nn.Parameter(torch.from_numpy(array))
    module.register_buffer("lower", torch.from_numpy(array[32:]), persistent=False)
    return module


def held() -> nn.Module:
    module = nn.Linear(64, 64)
    module.__dict__["same"] = module.weight
    return module


MADE = [view, buffer, other_order, one_memory, numpys, held, lambda: nn.Linear(64, 64)]


@pytest.mark.parametrize("make", MADE)
def test_every_look_at_the_bytes(linear: dict[str, torch.Tensor], make: Callable[[], nn.Module]) -> None:
    plain, ours = make(), make()
    plain.load_state_dict(linear)
    objects = {name: identity for name, (identity, _) in all_of(ours).items()}
    engine_shim.attach(ours, "m")
    there, here = ({slot.label: slot.tensor for slot in modules.slots(module)} for module in (plain, ours))
    assert list(there) == list(here)
    for name, tensor in there.items():
        assert same(tensor, here[name]) and tensor.stride() == here[name].stride(), name
        assert id(here[name]) == objects[name] and tensor.requires_grad == here[name].requires_grad, name
    with torch.no_grad():
        for module in (plain, ours):
            module.get_parameter("weight").zero_()
    assert all(same(tensor, here[name]) for name, tensor in there.items())  # and they go on sharing


def test_another_order_on_meta(linear: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        module = other_order()
    engine_shim.attach(module, "m")
    weight = module.get_parameter("weight")
    assert same(weight, linear["weight"]) and weight.stride() == (1, 64)


def test_shared_bytes_on_meta(linear: dict[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        module = one_memory()
    with pytest.raises(Mismatch, match=r"weight shares its bytes with another tensor on the meta device: build"):
        engine_shim.attach(module, "m")
    assert module.get_parameter("weight").is_meta and module.get_parameter("bias").is_meta


def test_a_module_that_was_made_in_inference_mode(linear: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        module = other_order()
    bias = module.get_parameter("bias")
    engine_shim.attach(module, "m")
    assert same(module.get_parameter("weight"), linear["weight"])
    assert same(module.get_parameter("bias"), linear["bias"]) and module.get_parameter("bias") is bias


class Over(nn.Linear):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict({**state, f"{prefix}weight": state[f"{prefix}weight"] * 2}, prefix, *args)


class Root(nn.Linear):
    def load_state_dict(self, *args: Any, **more: Any) -> Any:
        result = super().load_state_dict(*args, **more)
        self.weight.data.mul_(2)
        return result


class Extra(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def before() -> nn.Module:
    module = nn.Linear(64, 64)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


def after() -> nn.Module:
    module = nn.Linear(64, 64)
    module.register_load_state_dict_post_hook(lambda *_: None)
    return module


def listed() -> Any:
    module: Any = nn.Linear(64, 64)
    module.halves = list(module.weight.detach().chunk(2))
    return module


def wrapped() -> nn.Module:
    module = nn.Linear(64, 64)
    module.extra = nn.Parameter(Scaled(torch.zeros(4, dtype=torch.int8), 1.0), requires_grad=False)
    return module


def wrapped_weight() -> nn.Module:
    module = nn.Linear(64, 64)
    module.weight = nn.Parameter(Scaled(torch.zeros(64, 64, dtype=torch.int8), 1.0), requires_grad=False)
    return module


def expanded() -> nn.Module:
    module = nn.Linear(64, 64)
    module.bias = nn.Parameter(torch.zeros(1).expand(64))
    return module


def sparse() -> nn.Module:
    module = nn.Linear(64, 64)
    del module.bias
    module.register_buffer("bias", torch.zeros(64).to_sparse())
    return module


OWN_WAY = "has a way of its own to load weights .*: load it in the ordinary way"
REFUSED = [
    (lambda: Over(64, 64), OWN_WAY),
    (lambda: nn.Sequential(Over(64, 64)), f"0 .*{OWN_WAY}"),
    (lambda: Root(64, 64), OWN_WAY),
    (lambda: Extra(64, 64), OWN_WAY),
    (before, OWN_WAY),
    (after, OWN_WAY),
    (listed, "weight is looked at from outside the module tree: let go"),
    (wrapped, "no tensor extra, which the module needs: build"),
    (wrapped_weight, "weight is a .*Scaled, which is made of other tensors: load"),
    (expanded, "bias is an expanded tensor, .*: build"),
    (sparse, "bias is torch.sparse_coo .*: build"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_loads_otherwise_is_left_alone(
    linear: dict[str, torch.Tensor], make: Callable[[], nn.Module], words: str
) -> None:
    module = make()
    held = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    plain = [name for name, tensor in held.items() if type(tensor.data) is torch.Tensor and tensor.layout == torch.strided]
    bits = {name: look(held[name].detach()) for name in plain}
    with pytest.raises(Mismatch, match=words):
        engine_shim.attach(module, "m")
    now = module.state_dict(keep_vars=True)
    assert all(now[name] is tensor for name, tensor in held.items())
    assert bits == {name: look(now[name].detach()) for name in bits}


def test_a_module_that_has_no_shape_yet(linear: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Mismatch, match="weight has no shape yet: run the module once"):
        engine_shim.attach(nn.LazyLinear(64), "m")


def test_torchs_own_hooks_are_no_obstacle(filled: Loading, folder: Path) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))

    torch.manual_seed(1)
    source = made()
    safetensors.torch.save_file(source.state_dict(), folder / "model.safetensors")
    filled.load(folder)
    module = made()
    engine_shim.attach(module, "m")
    assert all(same(tensor, module.state_dict()[name]) for name, tensor in source.state_dict().items())


def shared() -> nn.Module:
    return nn.Linear(64, 64).share_memory()


def an_array() -> nn.Module:
    module = nn.Linear(64, 64)
    module.weight = nn.Parameter(torch.from_numpy(torch.rand(64, 64).numpy()))
    return module


@pytest.mark.parametrize("make", [shared, an_array])
def test_others_who_look_at_the_bytes_go_on_seeing_them(
    filled: Loading, linear: dict[str, torch.Tensor], make: Callable[[], nn.Module]
) -> None:
    """Another process, or the owner of an array: by name they get the bytes, and a published state takes nothing from them."""
    module = make()
    place = module.weight.data_ptr()
    engine_shim.attach(module, "m")
    assert module.weight.data_ptr() == place and same(module.weight, linear["weight"])

    engine_shim.publish(nn.Linear(64, 64), "m")
    assert all(map(filled.pool.adopt_publication, filled.pool.publications()))
    before = all_of(module)
    with pytest.raises(Mismatch, match=r"weight lies in memory that is shared with .* or an array's: attach first"):
        engine_shim.attach(module, "m")
    assert all_of(module) == before
    engine_shim.attach(nn.Linear(64, 64), "m")
    attached = engine_shim.attach(nn.Linear(64, 64), "m")
    engine_shim.attach(attached, "m")  # what is bound already is ours to exchange


@pytest.mark.parametrize("published", [False, True])
def test_in_inference_mode(filled: Loading, linear: dict[str, torch.Tensor], published: bool) -> None:
    plain, ours = nn.Linear(64, 64), nn.Linear(64, 64)
    if published:
        engine_shim.publish(nn.Linear(64, 64), "m")
        assert all(map(filled.pool.adopt_publication, filled.pool.publications()))
    with torch.inference_mode():
        plain.load_state_dict(linear)
        engine_shim.attach(ours, "m")
    assert [p.is_inference() for p in plain.parameters()] == [p.is_inference() for p in ours.parameters()] == [False, False]
    ours(torch.rand(2, 64)).sum().backward()


def test_a_state_of_other_weights_than_the_checkpoints(
    filled: Loading, folder: Path, linear: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Who names the checkpoint gets its weights, whatever was published before."""
    engine_shim.publish(engine_shim.attach(nn.Linear(64, 64), "m"), "m")
    assert all(map(filled.pool.adopt_publication, filled.pool.publications()))
    state = filled.pool.ready("m", "engine")[0].number

    def taken(**more: Any) -> tuple[bool, float]:
        module = engine_shim.attach(nn.Linear(64, 64), "m", **more)
        with open("/proc/self/maps") as maps:
            mapped = f".g{state}." in maps.read()
        value = float(module.weight.detach()[0, 0])
        del module
        return mapped, value

    old = float(linear["weight"][0, 0])
    assert taken(checkpoint=folder) == (True, old)
    Checkpoint({"weight": entry("F32", (64, 64), 3), "bias": entry("F32", (64,), 4)}).write(folder / "new")
    (folder / "new").rename(folder / "model.safetensors")
    filled.load(folder)
    new = float(safetensors.torch.load_file(folder / "model.safetensors")["weight"][0, 0])
    assert new != old
    assert taken() == (True, old), "without, a state of its class and key is taken, as documented"
    assert taken(checkpoint=folder)[1] == new
    with pytest.raises(Mismatch, match="cannot be read"):
        taken(checkpoint=tmp_path / "nowhere")
