"""`python -m engine_shim doctor [--json]`, for an engine's container that holds the shim and not the sidecar's commands."""

from __future__ import annotations

import sys

USAGE = "usage: python -m engine_shim doctor [--json]\n"


def main() -> int:
    if sys.version_info < (3, 9):
        sys.stderr.write("ballast: the shim needs Python 3.9 or later and stays off in this one: engines load without it\n")
        return 1
    if sys.argv[1:2] != ["doctor"]:
        sys.stderr.write(USAGE)
        return 2
    from engine_shim import doctor

    return doctor.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
