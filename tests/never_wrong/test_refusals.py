"""Shared memory that is not as a living sidecar leaves it: refused by type and in one sentence, and the file is read as ever.

Each damage is looked at through every way in: `engine_shim.open` raises, `safe_open` reads the file and says why, or with
BALLAST_MODE=require raises; and the next sidecar comes through it.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors

import engine_shim
from engine_shim.handoff import catalog, manifest, posix
from engine_shim.handoff.errors import Damaged, Foreign, HandoffError, NotFound, NotReady
from engine_shim.handoff.names import PoolPaths
from engine_shim.safe_open import stand_in
from tests.checkpoints import Checkpoint, entry
from tests.never_wrong import engine_side
from tests.never_wrong.bits import everything
from tests.never_wrong.forked import Engine
from tests.never_wrong.loading import Loading, loading
from tests.never_wrong.logs import Lines, forget_pools

ORIGINAL: Any = safetensors.safe_open
OURS: Any = stand_in(safetensors.safe_open)
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(2):
        Checkpoint({f"{number}.w": entry("F32", (300,), number)}).write(folder / f"{number}.safetensors")
    return folder


# Damages -----------------------------------------------------------------------------------------------------------


def overwrite(path: Path, data: bytes, offset: int) -> None:
    """Writes into a published object, as only its owner could, on purpose."""
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
    os.chmod(path, 0o400 if ".ctl" not in path.name else 0o600)


def flip_in_manifest(pool: Loading) -> None:
    path = pool.paths.manifest(1)
    overwrite(path, bytes([path.read_bytes()[500] ^ 1]), 500)


def cut_manifest(pool: Loading) -> None:
    os.truncate(pool.paths.manifest(1), 100)


def empty_manifest(pool: Loading) -> None:
    os.truncate(pool.paths.manifest(1), 0)


def other_format(pool: Loading) -> None:
    overwrite(pool.paths.manifest(1), struct.pack("<I", 99), 8)


def no_manifest(pool: Loading) -> None:
    pool.paths.manifest(1).unlink()


def resealed(pool: Loading, change: Callable[[Any], None]) -> None:
    """A manifest with a right checksum over wrong numbers."""
    path = pool.paths.manifest(1)
    document = json.loads(path.read_bytes()[manifest._HEADER.size :])
    change(document)
    body = json.dumps(document).encode()
    path.unlink()
    fd = posix.create(path, 0o400)
    header = manifest._HEADER.pack(manifest.MAGIC, manifest.FORMAT, 0, len(body), manifest._digest(body))
    posix.write_exactly(fd, header + body, 0, path)
    os.close(fd)


def of_another_generation(pool: Loading) -> None:
    resealed(pool, lambda document: document.update(generation=2))


def of_another_model(pool: Loading) -> None:
    resealed(pool, lambda document: document.update(model="other"))


def beyond_the_segment(pool: Loading) -> None:
    resealed(pool, lambda document: document["tensors"][0].__setitem__(5, 2 << 20))


def larger_than_the_segment(pool: Loading) -> None:
    """The table agrees with itself; the segment does not agree with the table."""

    def change(document: Any) -> None:
        document["segments"][0] = 1 << 40
        document["tensors"][0][5] = 1 << 30

    resealed(pool, change)


def of_another_type(pool: Loading) -> None:
    resealed(pool, lambda document: document["tensors"][0].__setitem__(1, "F64"))


def cut_segment(pool: Loading) -> None:
    os.truncate(pool.paths.segment(1, 0), 4096)


def empty_segment(pool: Loading) -> None:
    os.truncate(pool.paths.segment(1, 0), 0)


def no_segment(pool: Loading) -> None:
    pool.paths.segment(1, 0).unlink()


def link_for_segment(pool: Loading) -> None:
    path = pool.paths.segment(1, 0)
    away = path.with_name("ballast-away")
    os.rename(path, away)
    path.symlink_to(away)


def pipe_for_segment(pool: Loading) -> None:
    pool.paths.segment(1, 0).unlink()
    os.mkfifo(pool.paths.segment(1, 0))


def folder_for_segment(pool: Loading) -> None:
    pool.paths.segment(1, 0).unlink()
    pool.paths.segment(1, 0).mkdir()


def link_for_manifest(pool: Loading) -> None:
    path = pool.paths.manifest(1)
    away = path.with_name("ballast-away")
    os.rename(path, away)
    path.symlink_to(away)


def writable_segment(pool: Loading) -> None:
    os.chmod(pool.paths.segment(1, 0), 0o666)


def writable_manifest(pool: Loading) -> None:
    os.chmod(pool.paths.manifest(1), 0o420)


def writable_page(pool: Loading) -> None:
    os.chmod(pool.paths.control, 0o622)


def anothers_segment(pool: Loading) -> None:
    os.chown(pool.paths.segment(1, 0), NOBODY, NOBODY)


def anothers_manifest(pool: Loading) -> None:
    os.chown(pool.paths.manifest(1), NOBODY, NOBODY)


def anothers_page(pool: Loading) -> None:
    os.chown(pool.paths.control, NOBODY, NOBODY)


def no_page(pool: Loading) -> None:
    pool.paths.control.unlink()


def magic(pool: Loading) -> None:
    overwrite(pool.paths.control, b"BALLASTX", 0)


def version(pool: Loading) -> None:
    overwrite(pool.paths.control, struct.pack("<I", 7), 8)


def cut_page(pool: Loading) -> None:
    os.truncate(pool.paths.control, 5000)


def torn_slots(pool: Loading) -> None:
    for slot in (0, 1):
        overwrite(pool.paths.control, b"\xff", catalog.SLOT_OFFSET + slot * catalog.SLOT_SIZE + 60)


def senseless_catalog(pool: Loading) -> None:
    """With a right checksum: written by somebody who knows how."""
    payload = catalog.encode(pool.pool.catalog).replace(b'"ready"', b'"done!"')
    sequence = 1 << 40
    slot = catalog._SLOT.pack(sequence, len(payload), catalog._digest(sequence, payload))
    overwrite(pool.paths.control, slot + payload, catalog.SLOT_OFFSET)


@dataclass(frozen=True)
class Damage:
    do: Callable[[Loading], None]
    error: type[HandoffError]
    words: str


DAMAGES = [
    Damage(flip_in_manifest, Damaged, "checksum"), Damage(cut_manifest, Damaged, "checksum"),
    Damage(empty_manifest, Damaged, "cut short"), Damage(other_format, Damaged, "format 99"),
    Damage(no_manifest, NotFound, "gone"), Damage(of_another_generation, Damaged, "something else"),
    Damage(of_another_model, Damaged, "something else"), Damage(beyond_the_segment, Damaged, "place or size"),
    Damage(larger_than_the_segment, Damaged, "shorter than its manifest"), Damage(of_another_type, Damaged, "place or size"),
    Damage(cut_segment, Damaged, "shorter than its manifest"), Damage(empty_segment, Damaged, "shorter than its manifest"),
    Damage(no_segment, NotFound, "not there"), Damage(link_for_segment, Foreign, "symbolic link"),
    Damage(pipe_for_segment, Foreign, "not a plain file"), Damage(folder_for_segment, HandoffError, "w0"),
    Damage(link_for_manifest, Foreign, "symbolic link"), Damage(writable_segment, Foreign, "writable by other"),
    Damage(writable_manifest, Foreign, "writable by other"), Damage(writable_page, Foreign, "writable by other"),
    Damage(anothers_segment, Foreign, f"belongs to user {NOBODY}"), Damage(anothers_manifest, Foreign, "belongs to user"),
    Damage(anothers_page, Foreign, "belongs to user"), Damage(no_page, NotFound, "ballast serve"),
    Damage(magic, Damaged, "not a control page"), Damage(version, Damaged, "layout 7"),
    Damage(cut_page, Damaged, "5000 bytes"), Damage(torn_slots, Damaged, "torn"),
    Damage(senseless_catalog, Damaged, "does not make sense"),
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.do.__name__)
def test_damage_is_refused(
    filled: Loading, folder: Path, lines: Lines, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled.load(folder)
    intact = everything(ORIGINAL(folder / "0.safetensors", "pt"))
    try:
        damage.do(filled)
        # One who asks for Ballast is told so, at once.
        with pytest.raises(damage.error, match=damage.words) as caught:
            engine_shim.open("m", wait=60)
        assert "\n" not in str(caught.value)
        # An engine gets its weights all the same, and one line.
        opened = OURS(folder / "0.safetensors", "pt")
        assert type(opened) is ORIGINAL
        assert everything(opened) == intact
        said = lines.take()
        assert len(said) == 1 and damage.words in said[0] and said[0].endswith("(loading without Ballast)"), said
        # Or stops, if that was asked for.
        monkeypatch.setenv("BALLAST_MODE", "require")
        with pytest.raises(HandoffError, match=r"not loading without Ballast") as stopped:
            OURS(folder / "0.safetensors", "pt")
        assert damage.words in str(stopped.value)
        assert not lines.take()
    finally:
        clear(filled)


def clear(pool: Loading) -> None:
    """What the damage has left that is no object of a pool, or cannot be removed like one."""
    pool.paths.control.with_name("ballast-away").unlink(missing_ok=True)
    for name in pool.paths.objects():
        path = pool.paths.dir / name.file
        if path.is_dir():
            path.rmdir()
        elif path.exists() and stat.S_ISREG(path.stat().st_mode):
            os.chown(path, os.geteuid(), os.getegid())


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.do.__name__)
def test_the_next_sidecar_comes_through_damage(
    pool_name: str, folder: Path, lines: Lines, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops what is damaged and loads it again, or says why it cannot; it never serves it."""
    paths = PoolPaths(pool_name)
    monkeypatch.setenv("BALLAST_POOL", pool_name)
    with loading(paths, remove=False) as pool:
        pool.load(folder)
        intact = everything(ORIGINAL(folder / "0.safetensors", "pt"))
        damage.do(pool)
    try:
        with loading(paths) as pool:
            assert not pool.adopt(folder), "it adopted what is damaged"
            pool.load(folder)
            opened = OURS(folder / "0.safetensors", "pt")
            assert type(opened) is OURS, lines.all
            assert everything(opened) == intact
    except HandoffError as error:
        assert damage.do in (writable_page, anothers_page), error  # a person's to remove: it may be anybody's
        assert damage.words in str(error)
    finally:
        clear(pool)
        forget_pools()
        for name in paths.objects():
            (paths.dir / name.file).unlink()
        from engine_shim.handoff import semaphores

        semaphores.unlink(paths)


def test_a_damaged_model_does_not_touch_the_others(filled: Loading, folder: Path, lines: Lines, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    Checkpoint({"0.w": entry("F32", (300,), 7)}).write(tmp_path / "other" / "0.safetensors")
    filled.load(folder, "m")
    filled.load(tmp_path / "other", "other")
    flip_in_manifest(filled)
    with pytest.raises(Damaged):
        engine_shim.open("m")
    assert type(OURS(tmp_path / "other" / "0.safetensors", "pt")) is OURS
    with engine_shim.open("other") as model:
        assert len(model.tensors) == 2
    # The file that both hold is taken from the sound one.
    assert type(OURS(folder / "1.safetensors", "pt")) is OURS
    assert type(OURS(folder / "0.safetensors", "pt")) is ORIGINAL


def test_one_torn_slot_is_no_damage(filled: Loading, folder: Path) -> None:
    """A sidecar killed while writing leaves one; the other slot is whole."""
    filled.load(folder)
    filled.pool.page.write(filled.pool.catalog)  # so that both slots hold what is true
    for slot in (0, 1):
        start = catalog.SLOT_OFFSET + slot * catalog.SLOT_SIZE + 60
        with open(filled.paths.control, "r+b") as file:
            file.seek(start)
            before = file.read(1)
            file.seek(start)
            file.write(b"\xff")
            file.flush()
            assert type(OURS(folder / "0.safetensors", "pt")) is OURS
            engine_shim.open("m").close()
            file.seek(start)
            file.write(before)


def test_a_page_of_the_other_byte_order(filled: Loading, folder: Path) -> None:
    filled.load(folder)
    overwrite(filled.paths.control, struct.pack(">I", catalog.BYTE_ORDER), 12)
    with pytest.raises(Damaged, match="not a control page"):
        engine_shim.open("m")


# Other users


def test_an_engine_of_another_user(filled: Loading, folder: Path) -> None:
    """It cannot even open the pool, which is its owner's alone; it reads its files."""
    filled.load(folder)
    for path in (folder, *folder.parents):
        if path.owner() == "root" and path != Path("/"):
            os.chmod(path, 0o755)
    with Engine(filled.paths.pool) as engine:
        engine(engine_side.become, NOBODY)
        name, text = engine(engine_side.attempt, "open", "m")
        assert name == "Foreign" and "belongs to another user: run the sidecar and the engine as one user" in text
        with Engine() as plain:
            expected = plain(engine_side.load, "safe_open", str(folder / "0.safetensors"))
        assert engine(engine_side.load, "safe_open", str(folder / "0.safetensors")) == expected
        assert len(engine.lines) == 1 and "belongs to another user" in engine.lines[0]
        engine(engine_side.settings, {"BALLAST_MODE": "require"})
        name, text = engine(engine_side.attempt, "safe_open", str(folder / "0.safetensors"))
        assert name == "HandoffError" and "not loading without Ballast" in text


def test_a_pool_of_another_user(filled: Loading, folder: Path) -> None:
    """Made readable for us, on purpose: it would decide what our engine computes."""
    filled.load(folder)
    try:
        for name in filled.paths.objects():
            os.chown(filled.paths.dir / name.file, NOBODY, NOBODY)
            os.chmod(filled.paths.dir / name.file, 0o444)
        for path in (filled.paths.control,):
            with pytest.raises(Foreign, match=f"{path.name} belongs to user {NOBODY} and this process is user 0"):
                engine_shim.open("m")
        assert type(OURS(folder / "0.safetensors", "pt")) is ORIGINAL
    finally:
        clear(filled)


def test_an_engine_may_not_be_root_and_the_pool_roots(filled: Loading, folder: Path) -> None:
    """Root may do anything to us as it is, so what it owns is trusted; here it is only not readable."""
    filled.load(folder)
    for name in filled.paths.objects():
        os.chmod(filled.paths.dir / name.file, 0o444)
    for path in (folder, *folder.parents):
        if path != Path("/"):
            os.chmod(path, 0o755)
    with Engine(filled.paths.pool) as engine:
        engine(engine_side.become, NOBODY)
        engine(engine_side.load, "open", "m", "kept")
        assert engine(engine_side.segments)


# Nothing there


def test_one_that_was_killed_before_it_said_ready(
    pool_paths: PoolPaths, folder: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is complete by then; what the next sidecar loads is waited for all the same."""
    monkeypatch.setenv("BALLAST_POOL", pool_paths.pool)
    monkeypatch.setenv("BALLAST_WAIT", "20")
    with loading(pool_paths, remove=False) as pool:
        really = pool.pool._write

        def killed(new: catalog.Catalog) -> None:
            if any(generation.state == catalog.READY for generation in new.generations):
                raise SystemExit
            really(new)

        monkeypatch.setattr(pool.pool, "_write", killed)
        with pytest.raises(SystemExit):
            pool.load(folder)
        assert manifest.read(pool_paths.manifest(1)).complete
    with loading(pool_paths) as pool, ThreadPoolExecutor(1) as executor:
        pool.pool.adopt()
        engine = executor.submit(OURS, folder / "0.safetensors", "pt")
        assert not wait([engine], 0.5).done
        assert pool.load(folder).number == 2
        assert type(engine.result(20)) is OURS
    forget_pools()


def test_no_pool_at_all(pool_name: str, lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLAST_POOL", pool_name)
    with pytest.raises(NotFound, match=r"not there: start the sidecar with 'ballast serve'"):
        engine_shim.open("m", wait=60)
    assert type(OURS(folder / "0.safetensors", "pt")) is ORIGINAL
    assert len(lines.take()) == 1


def test_odd_names(lines: Lines, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in ("../x", "a b", "x" * 300, "a/b"):
        monkeypatch.setenv("BALLAST_POOL", pool)
        with pytest.raises(HandoffError, match="cannot name a pool"):
            engine_shim.open("m")
        assert type(OURS(folder / "0.safetensors", "pt")) is ORIGINAL
        assert len(lines.take()) == 1


def test_a_failed_model(filled: Loading, folder: Path, lines: Lines) -> None:
    filled.pool.fail("m", "the disk is on fire")
    with pytest.raises(NotReady, match="could not load 'm': the disk is on fire"):
        engine_shim.open("m", wait=60)
    assert type(OURS(folder / "0.safetensors", "pt")) is ORIGINAL
    assert "the disk is on fire" in lines.take()[0]
