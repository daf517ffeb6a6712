"""No data becomes code: what could make it so does not occur in the shim or the sidecar. Read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ROOT

SOURCES = sorted([*(ROOT / "engine_shim").rglob("*.py"), *(ROOT / "sidecar").rglob("*.py")])

# Modules that turn bytes into objects or code, and calls that run text.
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code", "codeop", "yaml",
    "jsonpickle",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
METHODS = {
    "import_module", "exec_module", "load_module", "run_path", "run_module", "reduce_ex", "__reduce__", "load_source",
    "allow_pickle", "system", "popen", "getoutput",
}  # fmt: skip

# Where one of these is rightly there: no data from the pool decides what is run.
ALLOWED = {
    # The hook runs the module that the program itself imports, as the interpreter would.
    ("engine_shim/hooks/bootstrap.py", "exec_module"),
    # And its own hooks, by a table that is written there.
    ("engine_shim/hooks/bootstrap.py", "__import__"),
    # torch and transformers, by name, so that the type checker does not follow them.
    ("sidecar/demo_checkpoint.py", "import_module"),
    # A sitecustomize of the user's own, found where the interpreter would have found it.
    ("engine_shim/hooks/site/sitecustomize.py", "exec_module"),
}


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield (node.module or "").split(".")[0], node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr, node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "load" and isinstance(node.value, ast.Name):
            if node.value.id in ("torch", "np", "numpy", "joblib"):
                yield f"{node.value.id}.load", node.lineno
        elif isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle") and not _is_false(node.value):
            yield str(node.arg), node.lineno


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_it_reads(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = [(what, line) for what, line in uses(ast.parse(path.read_text(), name)) if (name, what) not in ALLOWED]
    assert not found, f"{name}: {found}"


def test_it_would_be_noticed() -> None:
    bad = """
import pickle
from marshal import loads
import importlib
def f(data):
    eval(data); exec(data); compile(data, "", "exec"); __import__(data)
    importlib.import_module(data)
    torch.load(data)
    subprocess.run(data, shell=True)
    os.system(data)
"""
    assert {what for what, _ in uses(ast.parse(bad))} == {
        "pickle", "marshal", "eval", "exec", "compile", "__import__", "import_module", "torch.load", "shell", "system",
    }  # fmt: skip


def test_what_is_allowed_is_there() -> None:
    for name, what in ALLOWED:
        assert what in {found for found, _ in uses(ast.parse((ROOT / name).read_text()))}, (name, what)
