"""Directories for the sidecars of an engine across nodes: `split.py /models/model 2` makes /models/node-0 and /models/node-1.

Each holds hard links to its share of the checkpoint's files, in order, and an index of just these. Files at a border between
two shares go to both, since a layer may lie in either. Run it once, where the model volume is writable.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

INDEX = "model.safetensors.index.json"


def split(checkpoint: Path, nodes: int) -> list[Path]:
    """Makes the directories beside `checkpoint`, and returns them. Raises OSError where one is there already."""
    weight_map = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    if not 1 <= nodes <= len(files):
        raise ValueError(f"{len(files)} files cannot be shared by {nodes} nodes: name 1 to {len(files)}")
    made = []
    for node in range(nodes):
        first, last = node * len(files) // nodes, (node + 1) * len(files) // nodes
        mine = set(files[max(0, first - 1) if node else 0 : last + 1 if node < nodes - 1 else last])
        folder = checkpoint.parent / f"node-{node}"
        folder.mkdir()
        for name in mine:
            os.link(checkpoint / name, folder / name)
        for path in checkpoint.glob("*.json"):
            if path.name != INDEX:
                os.link(path, folder / path.name)
        index = {"metadata": {}, "weight_map": {name: file for name, file in weight_map.items() if file in mine}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        made.append(folder)
    return made


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[2].isdigit():
        sys.exit("usage: split.py CHECKPOINT NODES")
    try:
        print("\n".join(map(str, split(Path(sys.argv[1]), int(sys.argv[2])))))
    except (OSError, ValueError) as error:
        sys.exit(f"split.py: {error}")
