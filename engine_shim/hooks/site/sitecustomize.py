"""Switches the shim on in an interpreter in which Ballast is not installed: this file's folder goes on PYTHONPATH.

`ballast run` puts it there. Where an engine's image cannot be rebuilt, `ballast inject DIR` puts a link to this file into
DIR, for `PYTHONPATH=DIR`; or mount the folder `engine_shim` anywhere, for `PYTHONPATH=<there>/engine_shim/hooks/site`.
Python's `site` imports this module at start-up; without BALLAST_POOL it does nothing but give way to the `sitecustomize`
that it hides, if there is one.

The parent folder of `engine_shim` may be the whole site-packages of the sidecar, with versions of other libraries that
the engine must not see. So it does not go on `sys.path`; a finder at the very end of `sys.meta_path` looks there for
`engine_shim` alone, and only when nobody else has found it.
"""

from __future__ import annotations

import os
import sys

# Nothing here that the interpreter has not imported by now: this runs in every Python that an engine starts.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_SHIM = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))  # this file may be a link


class _ShimFinder:
    """Finds the package `engine_shim`, and nothing else, where this file comes from."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "engine_shim":
            return None
        from importlib.machinery import PathFinder

        return PathFinder.find_spec(name, [os.path.dirname(_SHIM)])


def _switch_on() -> None:
    if not os.environ.get("BALLAST_POOL") or os.environ.get("BALLAST_MODE", "").strip().lower() == "off":
        return
    if sys.version_info < (3, 9):
        return
    sys.meta_path.append(_ShimFinder)
    try:
        from engine_shim.hooks import bootstrap

        bootstrap.install()
    except Exception as error:  # whatever is wrong with us, the program starts
        sys.stderr.write(f"ballast: the shim is not switched on: {type(error).__name__}: {error}\n")


def _give_way() -> None:
    """Run the `sitecustomize` that would have been imported if this one were not on the path.

    Only those further down the path: one further up has been run, or it is the one that has just called us the same way.
    """
    folders = [os.path.abspath(folder) for folder in sys.path]
    ours = folders.index(_HERE) if _HERE in folders else -1
    behind = [folder for folder in sys.path[ours + 1 :] if os.path.abspath(folder) != _HERE]
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec("sitecustomize", behind) if find_spec else None
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            continue
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module  # the import system hands out what it finds here when we are done
        spec.loader.exec_module(module)  # what goes wrong in it is reported as without us
        return


_switch_on()
_give_way()
