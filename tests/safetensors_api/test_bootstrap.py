"""The `.pth` line and its finder: nothing at all when off, and when on the right names whatever was imported first."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine_shim.hooks import bootstrap
from tests.checkpoints import TORCH_DTYPES, one_of_each

ROOT = Path(__file__).parents[2]

# A pool in which every file is, made when it is first asked.
POOL = """
import sys, types
ladder = types.ModuleType("engine_shim.ladder")
asked = []
def shard_for(path):
    from tests.safetensors_api.side_by_side import FileShard
    asked.append(path)
    return FileShard(path)
ladder.shard_for = shard_for
sys.modules["engine_shim.ladder"] = ladder
"""


class Python:
    """Starts interpreters that read a `.pth` file of ours before they do anything else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        site = folder / "site"
        start = folder / "start"
        site.mkdir()
        start.mkdir()
        (site / "ballast.pth").write_text(bootstrap.PTH_LINE + "\n")
        (start / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
        self.path = [str(start), str(folder), str(ROOT)]

    def run(self, code: str, *args: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST")}
        environ.update(PYTHONPATH=os.pathsep.join(self.path), OMP_NUM_THREADS="1")
        environ.update({key: value for key, value in environment.items() if value is not None})
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent(code))
        return subprocess.run(
            [sys.executable, str(script), *args], env=environ, capture_output=True, text=True, timeout=120
        )

    def tell(self, code: str, *args: str, **environment: str | None) -> Any:
        """What the code assigns to `told`, having said nothing else."""
        done = self.run(textwrap.dedent(code) + "\nimport json; print(json.dumps(told))", *args, **environment)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def python(tmp_path: Path) -> Python:
    return Python(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    path = str(tmp_path / "model.safetensors")
    one_of_each(TORCH_DTYPES).write(path)
    return path


# Off


STATE = "import sys; told = [sorted(sys.modules), [type(finder).__name__ for finder in sys.meta_path]]"


@pytest.mark.parametrize("environment", [{}, {"BALLAST_POOL": ""}, {"BALLAST_POOL": "main", "BALLAST_MODE": "off"}])
def test_off_means_that_nothing_happened(python: Python, environment: dict[str, str]) -> None:
    modules, finders = python.tell(STATE, **environment)
    assert not [name for name in modules if name.startswith("engine_shim")]
    assert "HookingFinder" not in finders
    os.unlink(python.folder / "site" / "ballast.pth")
    assert python.tell(STATE, **environment) == [modules, finders]


def test_the_mode_is_read_like_everywhere(python: Python) -> None:
    assert "HookingFinder" not in python.tell(STATE, BALLAST_POOL="main", BALLAST_MODE=" OFF ")[1]


def test_off_leaves_safetensors_alone(python: Python) -> None:
    assert python.tell("import safetensors; told = type(safetensors.safe_open).__name__") == "type"


# On


def test_on_means_one_finder_and_no_heavy_import(python: Python) -> None:
    modules, finders = python.tell(STATE, BALLAST_POOL="main")
    assert finders.count("HookingFinder") == 1
    # Other start-up files may put finders in front of it; those of the interpreter are classes, and behind it.
    assert finders.index("HookingFinder") < finders.index("type")
    assert not {"torch", "numpy", "safetensors", "mmap", "logging", "threading", "json", "posix_ipc"} & set(modules)


USES = """
from safetensors import safe_open
from safetensors._safetensors_rust import safe_open as inner
from safetensors.torch import load_file, load_model, safe_open as through_torch
from safetensors.torch import load
import safetensors
"""

LOOK = """
import sys, torch, safetensors.numpy
path = sys.argv[1]
def digest(tensors):
    return {name: [str(t.dtype), list(t.shape), list(t.untyped_storage())] for name, t in sorted(tensors.items())}
linear = torch.nn.Linear(4, 2)
safetensors.torch.save_model(linear, path + ".linear")
loaded = torch.nn.Linear(4, 2)
with safe_open(path, "pt") as file:
    by_key = {name: file.get_tensor(name) for name in file.keys()}
    parts = {name: file.get_slice(name)[...] for name in file.keys() if name[:2] != "F4"}
told = [
    [type(name).__name__ for name in (safe_open, through_torch, inner, safetensors.numpy.safe_open)],
    [name is safetensors.safe_open for name in (safe_open, through_torch, inner, safetensors.numpy.safe_open)],
    [digest(by_key), digest(parts), digest(load_file(path)), digest(load(open(path, "rb").read()))],
    [[*map(list, load_model(loaded, path + ".linear"))], torch.equal(linear.weight, loaded.weight)],
]
"""


@pytest.mark.parametrize("first", ["hook", "safetensors", "torch"])
def test_all_names_in_every_order_of_imports(python: Python, checkpoint: str, first: str) -> None:
    one_of_each([dtype for dtype in TORCH_DTYPES if dtype not in ("F4", "F8_E8M0")]).write(checkpoint)
    plain = python.tell(USES + LOOK, checkpoint)
    if first == "hook":
        told = python.tell(POOL + USES + LOOK + "told.append(asked)", checkpoint, BALLAST_POOL="main")
    else:
        late = "import os; os.environ['BALLAST_POOL'] = 'main'; import engine_shim.hooks.bootstrap as b; b.install()"
        (python.folder / "user.py").write_text(USES)
        before = f"import {first}; import user\n"
        told = python.tell(POOL + before + late + "\nfrom user import *" + LOOK + "told.append(asked)", checkpoint)
    assert plain[0] == ["type"] * 4
    assert told[0] == ["StandIn"] * 4
    assert told[1:4] == plain[1:4]
    assert told[4] == [checkpoint, checkpoint, checkpoint + ".linear"]


def test_children_have_it_too(python: Python, checkpoint: str) -> None:
    code = """
    import multiprocessing, sys
    def look(path):
        import safetensors
        return type(safetensors.safe_open).__name__
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            told = pool.map(look, sys.argv[1:])
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            told += pool.map(look, sys.argv[1:])
        import json; print(json.dumps(told))
    """
    done = python.run(code, checkpoint, BALLAST_POOL="main")
    assert (done.stdout, done.stderr) == ('["StandIn", "StandIn"]\n', "")


def test_modules_keep_what_loaders_give_them(python: Python) -> None:
    code = """
    import importlib, importlib.resources, importlib.util, inspect, pkgutil, safetensors
    spec = safetensors.__spec__
    told = [
        type(safetensors.__loader__).__name__, safetensors.__loader__ is spec.loader,
        spec.origin == safetensors.__file__,
        spec.submodule_search_locations == list(safetensors.__path__), safetensors.__package__,
        inspect.getsource(safetensors), importlib.resources.files("safetensors").joinpath("py.typed").is_file(),
        pkgutil.get_data("safetensors", "__init__.py").decode(), importlib.util.find_spec("safetensors.torch").name,
        spec.loader.get_filename("safetensors"), spec.cached, spec.has_location, spec.loader.is_package("safetensors"),
    ]
    """
    assert python.tell(code) == python.tell(code, BALLAST_POOL="main")


def test_reloading_keeps_the_hook(python: Python) -> None:
    code = """
    import importlib, safetensors
    first = safetensors.safe_open
    importlib.reload(safetensors)
    del __import__("sys").modules["safetensors"]
    import safetensors as anew
    told = [type(first).__name__, safetensors.safe_open is first, type(anew.safe_open).__name__]
    """
    assert python.tell(code, BALLAST_POOL="main") == ["StandIn", True, "StandIn"]


def test_installing_twice_changes_nothing(python: Python) -> None:
    code = """
    import sys, engine_shim.hooks.bootstrap as bootstrap, safetensors
    from engine_shim.hooks.safetensors import patch
    first = safetensors.safe_open
    bootstrap.install(), bootstrap.install(), patch(safetensors)
    finders = [type(finder).__name__ for finder in sys.meta_path].count("HookingFinder")
    told = [finders, safetensors.safe_open is first, type(first.original).__name__]
    """
    assert python.tell(code, BALLAST_POOL="main") == [1, True, "type"]


def test_a_shim_that_is_gone_does_not_stop_the_interpreter(python: Python) -> None:
    python.path.remove(str(ROOT))
    done = python.run("print('here')", BALLAST_POOL="main")
    assert (done.returncode, done.stdout) == (0, "here\n")


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_failing_hook_is_one_line(python: Python, mode: str) -> None:
    (python.folder / "break.py").write_text("import engine_shim.hooks.safetensors as hook\nhook.stand_in = None\n")
    code = "import importlib; importlib.import_module('break')\nimport safetensors; print(safetensors.safe_open)"
    done = python.run(code, BALLAST_POOL="main", BALLAST_MODE=mode)
    reason = "TypeError: 'NoneType' object is not callable"
    line = f"Ballast could not hook safetensors, which works as without Ballast: {reason}"
    if mode == "auto":
        assert (done.returncode, done.stdout, done.stderr) == (0, "<class 'builtins.safe_open'>\n", line + "\n")
    else:
        assert done.returncode == 1
        assert done.stderr.startswith(line)
        assert done.stderr.endswith(reason + "\n")


# The finder by itself, with hooks of our own


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package `hooked` with a submodule, whose hook adds its name to the list."""
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "__init__.py").write_text("runs = globals().get('runs', 0) + 1\n")
    (tmp_path / "hooked" / "part.py").write_text("import hooked\n")
    calls: list[str] = []
    hooks: Any = ModuleType("hooks_of_ours")
    hooks.note = lambda module: calls.append(module.__name__)
    monkeypatch.setitem(sys.modules, "hooks_of_ours", hooks)
    monkeypatch.setattr(bootstrap, "HOOKS", {"hooked": "hooks_of_ours:note", "hooked.part": "hooks_of_ours:note"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BALLAST_POOL", "main")
    monkeypatch.delenv("BALLAST_MODE", raising=False)
    yield calls
    for name in ("hooked.part", "hooked"):
        sys.modules.pop(name, None)


def test_packages_and_submodules(library: list[str]) -> None:
    bootstrap.install()
    importlib.import_module("hooked.part")
    assert library == ["hooked", "hooked.part"]


def test_what_is_imported_already_is_hooked_at_once(library: list[str]) -> None:
    importlib.import_module("hooked")
    bootstrap.install()
    bootstrap.install()
    assert library == ["hooked"]


def test_looking_for_a_module_does_not_run_it(library: list[str]) -> None:
    bootstrap.install()
    assert importlib.util.find_spec("hooked") is not None
    assert library == []
    assert importlib.util.find_spec("hooked.none") is None  # which imports the parent
    assert library == ["hooked"]


def test_a_missing_module_is_missing(library: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bootstrap.HOOKS, "not_there", "hooks_of_ours:note")
    bootstrap.install()
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there'$"):
        importlib.import_module("not_there")


def test_a_module_that_fails_is_not_hooked(library: list[str], tmp_path: Path) -> None:
    (tmp_path / "hooked" / "__init__.py").write_text("raise KeyError('its own')\n")
    bootstrap.install()
    with pytest.raises(KeyError, match="its own"):
        importlib.import_module("hooked")
    assert library == []


def test_threads_that_import_at_once(library: list[str]) -> None:
    bootstrap.install()
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        bootstrap.install()
        importlib.import_module("hooked.part")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(library) == ["hooked", "hooked.part"]
    assert [type(finder).__name__ for finder in sys.meta_path].count("HookingFinder") == 1


class Delegating:
    """Another tool's finder: asks the whole import system for the module, and adds something of its own."""

    def __init__(self) -> None:
        self.busy = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if self.busy or not name.startswith("hooked"):
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy = False
        if spec is not None:
            spec.loader_state = "seen"
        return spec


@pytest.mark.parametrize("place", ["front", "behind us", "both"])
def test_other_finders_of_the_same_kind(library: list[str], place: str) -> None:
    bootstrap.install()
    if place in ("front", "both"):
        sys.meta_path.insert(0, Delegating())
    if place in ("behind us", "both"):
        sys.meta_path.insert(1 + (place == "both"), Delegating())
    module = importlib.import_module("hooked.part")
    assert library == ["hooked", "hooked.part"]
    assert module.__spec__ is not None
    assert module.__spec__.loader_state == "seen"


def test_a_program_that_replaces_meta_path(library: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.install()
    ours = sys.meta_path[0]

    class Front:
        def find_spec(self, *args: Any) -> Any:
            return ours.find_spec(*args)

    monkeypatch.setattr(sys, "meta_path", [Front(), *sys.meta_path[1:]])
    importlib.import_module("hooked")
    assert library == ["hooked"]


def test_a_finder_that_fails_is_heard_as_ever(library: list[str], caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            raise ImportError("not today")

    bootstrap.install()
    sys.meta_path.insert(1, Failing())
    with pytest.raises(ImportError, match=r"^not today$"):
        importlib.import_module("hooked")


def test_lazily_loaded_modules_are_hooked_when_they_load(library: list[str]) -> None:
    bootstrap.install()
    spec = importlib.util.find_spec("hooked")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hooked"] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    assert library == []
    assert module.runs == 1
    assert library == ["hooked"]


def test_zipped_packages(library: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("hooked/__init__.py", "hooked/part.py"):
            file.write(tmp_path / name, name)
        file.writestr("other.py", "")
    monkeypatch.syspath_prepend(str(archive))
    bootstrap.install()
    for _ in range(3):
        importlib.util.find_spec("hooked")
    importlib.import_module("hooked.part")
    importlib.import_module("other")
    del sys.modules["other"]
    assert library == ["hooked", "hooked.part"]


class Unyielding(importlib.abc.Loader):
    """A loader written in C, as far as anyone can tell: it takes no attributes."""

    __slots__ = ()
    made_by_loader = "yes"

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.loader_while_running = module.__loader__  # type: ignore[attr-defined]


class AsClass:
    """Like the built-in importer: the class itself is the loader."""

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        module.loader_while_running = module.__loader__  # type: ignore[attr-defined]


@pytest.mark.parametrize("loader", [Unyielding(), AsClass], ids=["instance", "class"])
def test_loaders_that_take_no_attributes(library: list[str], loader: Any) -> None:
    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            return importlib.machinery.ModuleSpec(name, loader) if name == "hooked" else None

    bootstrap.install()
    sys.meta_path.insert(1, Finder())
    module = importlib.import_module("hooked")
    assert library == ["hooked"]
    assert module.__loader__ is loader
    assert module.__spec__ is not None
    assert module.__spec__.loader is loader
    assert module.loader_while_running is loader
    assert not hasattr(AsClass, "_ballast_hooks")


def test_namespace_packages(library: list[str], tmp_path: Path) -> None:
    os.unlink(tmp_path / "hooked" / "__init__.py")
    (tmp_path / "hooked" / "part.py").write_text("")
    bootstrap.install()
    importlib.import_module("hooked.part")
    assert library[-1] == "hooked.part"


def test_a_failing_hook_leaves_the_module(
    library: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for hook in ("no_such_module_of_ours:note", "hooks_of_ours:nothing", "hooks_of_ours"):
        monkeypatch.setitem(bootstrap.HOOKS, "hooked", hook)
        bootstrap.install()
        sys.modules.pop("hooked", None)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "ballast"):
            assert importlib.import_module("hooked").runs == 1
        assert len([record for record in caplog.records if record.name == "ballast"]) == 1


def test_broken_logging_is_no_reason_to_fail(library: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "logging", None)  # makes importing it fail
    monkeypatch.setitem(bootstrap.HOOKS, "hooked", "hooks_of_ours:nothing")
    bootstrap.install()
    assert importlib.import_module("hooked").runs == 1


def test_specs_can_still_be_pickled(library: list[str]) -> None:
    """As a rule nobody does, but what can be done without us can be done with us."""
    importlib.import_module("hooked")
    spec = sys.modules["hooked"].__spec__
    plain = pickle.dumps(spec)
    del sys.modules["hooked"]
    bootstrap.install()
    importlib.import_module("hooked")
    spec = sys.modules["hooked"].__spec__
    assert pickle.dumps(spec) == plain
