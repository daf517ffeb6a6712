"""What a `.pth` line runs at interpreter start: a finder that hooks libraries when, and only when, they are imported.

The line (see `PTH_LINE`) looks at the environment before it imports anything of ours, so a process without
`BALLAST_POOL` pays for a dictionary look-up. With it, `install` puts one finder in front of `sys.meta_path`. The finder
lets the finders behind it find a module of the table `HOOKS`, and calls the hook once the module has run; every other
import costs one look-up.

The line runs in every process of an engine: launchers, workers, resource trackers, `python -m pip`. So nothing here
raises, and nothing is imported that a bare interpreter has not imported already: no `threading`, `logging`, `typing` or
`importlib.util` at the top of this file.
"""

from __future__ import annotations

import _thread
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any, Sequence

HOOKS = {
    # module, as it is imported -> function called with it, as "module:function"
    "safetensors": "engine_shim.hooks.safetensors:patch",
    "vllm.model_executor.model_loader": "engine_shim.hooks.vllm:patch",
    "sglang.srt.model_loader.loader": "engine_shim.hooks.sglang:patch",
    "sglang.srt.model_executor.model_runner_components.weight_updater": "engine_shim.hooks.sglang:patch_updates",
    "sglang.srt.managers.scheduler_components.weight_updater": "engine_shim.hooks.sglang:patch_scheduler",
    "sglang.srt.model_executor.model_runner": "engine_shim.hooks.sglang:patch_runner",
}

PTH_LINE = (
    'import os; os.environ.get("BALLAST_POOL") and os.environ.get("BALLAST_MODE") != "off"'
    ' and __import__("engine_shim.hooks.bootstrap").hooks.bootstrap.install()'
)

_installing = _thread.RLock()


def switched_on() -> bool:
    """Whether the environment asks for the shim."""
    return bool(os.environ.get("BALLAST_POOL")) and _mode() != "off"


def _mode() -> str:
    return os.environ.get("BALLAST_MODE", "").strip().lower()


def install() -> None:
    """Hook every library of the table: now if it is imported already, and else when it will be.

    Does nothing unless the environment asks for it. Idempotent; never raises.
    """
    try:
        if switched_on():
            with _installing:
                _install()
    except Exception as error:
        _report("could not install its import hook", error)


def _install() -> None:
    if any(isinstance(finder, HookingFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, HookingFinder())
    # After the finder: what another thread imports meanwhile is hooked twice, which is harmless, rather than never.
    for name in HOOKS:
        module = sys.modules.get(name)
        if module is not None and not _is_running(module):
            run_hook(name, module)


def run_hook(name: str, module: ModuleType) -> None:
    """Call the hook of module `name`. What goes wrong is logged; with BALLAST_MODE=require it is raised as well."""
    try:
        where, _, function = HOOKS[name].partition(":")
        __import__(where)
        getattr(sys.modules[where], function)(module)
    except Exception as error:
        _report(f"could not hook {name}, which works as without Ballast", error)
        if _mode() == "require":
            raise


def _report(what: str, error: Exception) -> None:
    try:
        import logging

        logging.getLogger("ballast").warning("Ballast %s: %s: %s", what, type(error).__name__, error)
    except Exception:
        pass  # a host whose logging is broken still gets its own start


def _is_running(module: ModuleType) -> bool:
    """Whether the body of the module is being executed right now (by this thread or another)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class HookingFinder:
    """Finds the modules of `HOOKS` through the finders behind it, with a loader that runs the hook after the module.

    A module that another thread was just executing when the finder was installed is missed. Nothing imports an
    inference library before the `.pth` files have been read, so that takes a late call of `install`.
    """

    def __init__(self) -> None:
        self._searching: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in HOOKS:
            return None
        search = (_thread.get_ident(), name)
        if search in self._searching:
            return None  # a finder behind us asked `sys.meta_path` itself, and so came back to us
        self._searching.add(search)
        try:
            spec = self._find_behind(name, path, target)
            if spec is not None and spec.loader is not None:
                _run_hook_after(spec)
            return spec
        except Exception as error:
            _report(f"could not watch the import of {name}, which works as without Ballast", error)
            return None
        finally:
            self._searching.discard(search)

    def _find_behind(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        finders: list[Any] = list(sys.meta_path)
        # Those in front have declined already. A program may also have taken us out, to call us from its own finder.
        behind = finders[finders.index(self) + 1 :] if self in finders else finders
        for finder in behind:
            find_spec = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                return spec
        return None


def _run_hook_after(spec: ModuleSpec) -> None:
    """Make the loader of `spec` run the hook after the module's body.

    The loader stays the object it is, with one attribute of the instance on top until the module runs, since programs
    look at a module's loader for its type, source and resources. Only a loader that takes no attributes is wrapped.
    """
    loader: Any = spec.loader
    run = getattr(loader, "exec_module", None)
    if run is None or isinstance(loader, _Wrapped) or isinstance(run, _RunAndHook):
        return  # one that cannot run a module by itself, or was found before (a zipimporter serves many modules)
    if not isinstance(loader, type):  # built-in and frozen modules have a class for a loader: not ours to change
        try:
            loader.exec_module = _RunAndHook(loader, run)
            return
        except AttributeError:
            pass
    spec.loader = _Wrapped(loader)  # type: ignore[assignment]


def _loaded(module: ModuleType) -> None:
    if module.__name__ in HOOKS:
        run_hook(module.__name__, module)


class _RunAndHook:
    """Stands in for a loader's `exec_module`, once."""

    def __init__(self, loader: Any, run: Any) -> None:
        self._loader = loader
        self._run = run

    def __call__(self, module: ModuleType) -> None:
        if self._loader.exec_module is self:
            del self._loader.exec_module
        self._run(module)
        _loaded(module)


class _Wrapped:
    """A loader that takes no attributes; gone from the module once it has run."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _loaded(module)
