"""Progress in a log: a line every few seconds for each model, however often loading reports."""

from __future__ import annotations

import logging

import pytest

from engine_shim.handoff.catalog import LOADING, READY
from sidecar import progress


def test_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress.log, "handlers", [caplog.handler])  # whatever the tests before have left there
    monkeypatch.setattr(progress.log, "propagate", False)
    lines = progress.Lines()
    with caplog.at_level(logging.INFO, "ballast"):
        for step in range(120):  # a minute, twice a second, 1 MiB each
            now = 100.0 + step / 2
            lines("m", step << 20, 120 << 20, LOADING)
            if step == 60:
                lines("n", 0, 1 << 20, LOADING)
        lines("m", 120 << 20, 120 << 20, READY)
        lines("m", 0, 7 << 20, LOADING)  # the next generation begins anew
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 11
    assert said[0] == "loading m: 10.00 MiB of 120.00 MiB (8 %), 2.00 MiB/s"
    assert said[-1] == "loading m: 110.00 MiB of 120.00 MiB (91 %), 2.00 MiB/s"
