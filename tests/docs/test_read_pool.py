"""What the documentation shows really runs: the reader that knows only docs/protocol.md, and the examples of the Python API."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests import checkpoints
from tests.processes import ROOT, Sidecar, environment

READER = ROOT / "docs" / "examples" / "read_pool.py"


def read_pool(*args: str) -> str:
    """The reader's output. Run isolated (-I), so that it cannot import anything of Ballast by accident."""
    done = subprocess.run(
        [sys.executable, "-I", str(READER), *args], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reads_a_living_pool(tmp_path: Path, pool_name: str) -> None:
    file = checkpoints.one_of_each()
    file.write(tmp_path / "model.safetensors")
    with Sidecar(pool_name, tmp_path, args=["--name", "m"]) as sidecar:
        generation = sidecar.ready("m")
        total = sum(len(data) for _, _, data in file.tensors.values())
        assert read_pool(pool_name) == f"{generation.number} m checkpoint ready {total}\n"

        lines = read_pool(pool_name, "m").splitlines()
        assert [line.split(" ", 1)[0] for line in lines] == list(file.tensors)

        for name in ("BF16.2x3x4", "F4.4", "BOOL.scalar", "F64.0"):
            dtype, shape, data = file.tensors[name]
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
            assert read_pool(pool_name, "m", name) == f"{name} {dtype} {list(shape)} {data[:64].hex()} {digest}\n"
        assert not [name for name in sidecar.paths.objects() if name.kind == "attachment"]
        sidecar.interrupt()


def test_refuses_what_is_not_a_pool(tmp_path: Path) -> None:
    (tmp_path / "ballast-p.ctl").write_bytes(bytes(528384))
    (tmp_path / "ballast-p.ctl").chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-I", str(READER), "p"],
        env={"BALLAST_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "not a control page" in done.stderr


def test_examples_of_the_python_api(tmp_path: Path, pool_name: str) -> None:
    pytest.importorskip("transformers")
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "python-api.md").read_text(), re.MULTILINE | re.DOTALL
    )
    script = "\n".join(textwrap.dedent(block) for block in blocks)
    made = subprocess.run(
        [sys.executable, "-c", MAKE_CHECKPOINT, str(tmp_path / "tiny")],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with Sidecar(pool_name, tmp_path / "tiny") as sidecar:
        sidecar.ready("tiny")
        (tmp_path / "examples.py").write_text(script)
        done = subprocess.run(
            [sys.executable, str(tmp_path / "examples.py")],
            cwd=tmp_path, env=environment(pool_name), capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        sidecar.interrupt()


# The same lines as in docs/python-api.md, "Before you start".
MAKE_CHECKPOINT = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
)
transformers.LlamaForCausalLM(config).save_pretrained(sys.argv[1])
"""
