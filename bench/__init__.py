"""Measurements of Ballast, side by side with what it is compared with. `python bench/run.py --help` says how."""
