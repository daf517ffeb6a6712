"""`python -m sidecar` is the command `ballast`."""

from sidecar.cli import main

main()
