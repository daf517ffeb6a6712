"""transformers, sentence_transformers and diffusers, unmodified, on real and on random models: the same program gives the
same bits with Ballast as without, whatever it goes on to do with its models, and really had them from memory."""

from __future__ import annotations

import re

import pytest

from tests.engines.conftest import KINDS, Runs

# Whose loaders put the tensors of the file into the model as they are. The others copy, with Ballast as without it.
ZERO_COPY = ("llama-tied", "llama-shards", "minilm", "smollm2")
MIB = 1 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_same_in_every_respect(runs: Runs, kind: str) -> None:
    without, attached = runs.without.told[kind], runs.attached.told[kind]
    assert "failed" not in without, without["failed"]
    assert "failed" not in attached, attached["failed"]
    assert list(without) == list(attached)
    for aspect, value in without.items():
        if aspect not in ("mapped", "still mapped", "output"):
            assert attached[aspect] == value, aspect
    if "output" in without:
        # In memory it lies as well as in memory of its own; in a file it lies as it happens (see `moved`).
        assert attached["output"] == without["output, moved"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_really_came_from_memory(runs: Runs, kind: str) -> None:
    pattern = rf"ballast: {kind} comes from memory: generation {runs.generations[kind]} of pool"
    assert len(re.findall(pattern, runs.attached.log)) == 1, runs.attached.log
    assert "ballast:" not in runs.without.log
    assert runs.without.told[kind]["mapped"]["in_maps"] == 0


@pytest.mark.parametrize("kind", ZERO_COPY)
def test_nothing_was_copied(runs: Runs, kind: str) -> None:
    mapped = runs.attached.told[kind]["mapped"]
    assert mapped["parameters"] > 0
    assert mapped["in_maps"] == mapped["parameters"]
    assert mapped["private"] == 0


def test_running_it_copies_nothing_either(runs: Runs) -> None:
    mapped = runs.attached.told["smollm2"]["still mapped"]
    assert mapped["parameters"] == mapped["in_maps"] > 200 * MIB
    assert mapped["private"] == 0


def test_the_models_own_words(runs: Runs) -> None:
    assert "Paris" in runs.attached.told["smollm2"]["answer"]
    assert runs.attached.told["smollm2"]["tokens"] == runs.without.told["smollm2"]["tokens"]


@pytest.mark.parametrize("kind", ["llama-tied", "llama-shards"])
def test_what_is_done_with_it_stays_its_own(runs: Runs, kind: str) -> None:
    """Loading it again after training it in place gives what the files hold, not what was trained."""
    told = runs.attached.told[kind]
    assert told["loaded again"] is True and told["as it was"] is True
    assert told["trained itself"]["state"] != told["loaded"]["state"]
    assert bool(told["loaded"]["ties"]) == (kind == "llama-tied")
