from tests.never_wrong.fixtures import filled, lines

__all__ = ["filled", "lines"]
