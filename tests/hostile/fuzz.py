"""Coverage-guided fuzzing of everything that reads other processes' bytes: `make fuzz`, or for one reader

    python -m tests.hostile.fuzz manifest --seconds 60

Uses atheris (libFuzzer for Python), which mutates with an eye on the branches of our readers that an input reaches. Inputs
begin with the examples of this folder, so that it starts behind the first checks. With `all` the first byte chooses the reader.
Does not end with 0 if a reader fails in any way but refusing, takes more than 1 GiB of memory, or longer than 5 s for one
input; libFuzzer has written that input to the working directory then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path


def seeds(reader: str, folder: Path, prefix: bytes = b"") -> None:
    """What sound and hostile bytes of this kind there are to begin with."""
    examples = Path(__file__).parent / "examples"
    for path in examples.glob("*.json"):
        example = json.loads(path.read_text())
        if example["what"] != reader or example.get("times", 1) > 1:
            continue
        data = json.dumps(example["document"]).encode() if "document" in example else example["text"].encode()
        if reader == "header":
            data = example["data"].to_bytes(2, "little") + data
        (folder / path.stem).write_bytes(prefix + data)
    if reader == "page":
        (folder / "page").write_bytes(prefix + b"\x00\x00\x00\x01\x10\x00\x08abcdefgh")
    if reader == "sealed":
        from tests.hostile.readers import sealed

        (folder / "sealed").write_bytes(prefix + sealed(b"{}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz one reader of other processes' bytes.")
    parser.add_argument("reader", nargs="?", default="all")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    chosen = parser.parse_args()
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install '.[fuzz]'")
    with atheris.instrument_imports(include=["engine_shim.handoff", "sidecar.checkpoint"]):
        from tests.hostile import readers
    if chosen.reader not in ("all", *readers.READERS):
        sys.exit(f"there is no reader {chosen.reader!r}: take all, or one of {', '.join(readers.READERS)}")
    names = list(readers.READERS)

    def one(data: bytes) -> None:
        try:
            if chosen.reader != "all":
                readers.READERS[chosen.reader](data)
            elif data:
                readers.READERS[names[data[0] % len(names)]](data[1:])
        except readers.REFUSALS as refusal:
            assert "\n" not in str(refusal)

    with tempfile.TemporaryDirectory(prefix="ballast-fuzz-") as place:
        child = os.fork()
        if child:  # libFuzzer ends its process without ceremony, so somebody else has to tidy up
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        readers.PLACE, folder = place, os.path.join(place, "inputs")
        os.mkdir(folder)
        for index, name in enumerate(names):
            if chosen.reader in ("all", name):
                seeds(name, Path(folder), bytes([index]) if chosen.reader == "all" else b"")
        options = ["-timeout=5", "-rss_limit_mb=1024", "-max_len=4096", "-print_final_stats=1"]
        options += [f"-max_total_time={chosen.seconds}", f"-seed={chosen.seed}"]
        atheris.Setup([sys.argv[0], *options, folder], one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
