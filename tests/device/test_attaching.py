"""Weights on a GPU: every bit as in host memory, nothing copied, on the right GPU whatever its number, under a lease."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_shim import device
from engine_shim.handoff import attachment, holder, manifest
from engine_shim.handoff.errors import Damaged, DeviceError
from engine_shim.handoff.manifest import DeviceCopy, Window
from tests.checkpoints import Checkpoint, entry
from tests.crash.instrumented import HOLDING, hold, instrumented, release
from tests.device import gpu_side
from tests.device.emulated import MIB, A, B, M, Machine, contents, resident, the_holder, until
from tests.never_wrong import engine_side
from tests.processes import Sidecar, ballast, environment


def test_every_bit_of_every_type_on_each_gpu_and_nothing_copied(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder) as sidecar:
        before = sidecar.ready("model")
        found = resident(sidecar.paths, 1, {A, B})
        assert found.tensors and before.total == found.nbytes
        with machine.engine(pool_name) as engine:
            truth = engine(engine_side.load, "open", "model")
            assert engine(gpu_side.open_on, "cuda:0", "model") == truth
            assert engine(gpu_side.storages) == len(engine(gpu_side.addresses))
            for address in engine(gpu_side.addresses).values():
                assert str(machine.folder) in engine(gpu_side.mapped_file, address), "not the holder's memory"
            assert machine.log("open", engine.pid) == machine.log("open alloc.0", engine.pid)
            assert len(machine.log("open", engine.pid)) == len(found.segments)
            # Again, and by UUID: no handle is opened twice.
            assert engine(gpu_side.open_on, A, "model", "again") == truth
            assert len(machine.log("open", engine.pid)) == len(found.segments)
            assert machine.log("context", engine.pid) == [f"context {A}"]


def test_numbers_of_gpus_mean_nothing(machine: Machine, pool_name: str, folder: Path) -> None:
    """Two engines that see the GPUs in the opposite order, and one that sees only the second."""
    with machine.sidecar(pool_name, folder) as sidecar:
        resident(sidecar.paths, 1, {A, B})
        with machine.engine(pool_name, CUDA_VISIBLE_DEVICES="1,0") as engine:
            assert engine(gpu_side.gpus) == [(0, B), (1, A)]
            truth = engine(engine_side.load, "open", "model")
            assert engine(gpu_side.open_on, "cuda:0", "model") == truth
            assert machine.log("context", engine.pid) == [f"context {B}"], "a context on a GPU that was not asked for"
            assert all(line.startswith("open alloc.1") for line in machine.log("open", engine.pid))
            assert [r.residency for r in attachment.alive(sidecar.paths) if r.residency != "host"] == [f"cuda:{B}"]
        with machine.engine(pool_name, CUDA_VISIBLE_DEVICES=B) as engine:
            assert engine(gpu_side.open_on, "cuda", "model") == truth
            assert all(line.startswith("open alloc.1") for line in machine.log("open", engine.pid))
            with pytest.raises(DeviceError, match="this process sees cuda:0"):
                engine(gpu_side.open_on, A, "model")


def test_one_gpu_of_two_and_a_mig_instance(libcuda: Path, pool_name: str, folder: Path) -> None:
    machine = Machine(libcuda, {A: 64 * MIB, M: 64 * MIB})
    try:
        with machine.sidecar(pool_name, folder, args=("--device", M)) as sidecar:
            sidecar.ready("model")
            resident(sidecar.paths, 1, {M})
            with machine.engine(pool_name) as engine:
                truth = engine(engine_side.load, "open", "model")
                assert engine(gpu_side.gpus) == [(0, A), (1, M)]
                assert engine(gpu_side.open_on, "cuda:1", "model") == truth
                assert machine.log("context", engine.pid) == [f"context {M}"]
                # Where there is no copy: from host memory, and one line says so.
                assert engine(gpu_side.open_on, "cuda:0", "model", "copied") == truth
                assert "is copied from host memory" in engine.says("has no copy on")
            # Nor does the holder touch the other one; the sidecar touches none.
            assert machine.log("context", the_holder(sidecar.paths)) == [f"context {M}"]
            assert not machine.log("context", sidecar.pid)
    finally:
        machine.close()


def test_the_lease_lasts_as_long_as_a_tensor_and_handles_are_closed_before_it_ends(
    machine: Machine, pool_name: str, folder: Path, tmp_path: Path
) -> None:
    closing = tmp_path / "closing"
    with machine.sidecar(pool_name, folder) as sidecar:
        resident(sidecar.paths, 1, {A, B})

        def leases() -> list[str]:
            return [r.residency for r in attachment.alive(sidecar.paths)]

        with machine.engine(pool_name) as engine:
            engine(gpu_side.note_closing, str(closing))
            engine(gpu_side.open_on, "cuda:0", "model")
            assert leases() == [f"cuda:{A}"]
            engine(gpu_side.keep_one_tensor)
            assert leases() == [f"cuda:{A}"]
            until(lambda: len(machine.log("close", engine.pid)) == 1, "the handle of the other segment is closed")
            engine(gpu_side.drop_tensor)
            until(lambda: not leases(), "the lease ends")
            assert len(machine.log("close", engine.pid)) == 2
        with machine.engine(pool_name) as engine:  # the program ends while it uses them
            engine(gpu_side.note_closing, str(closing))
            engine(gpu_side.open_on, "cuda:1", "model")
            engine.start(gpu_side.leave)
            engine.wait()
            assert not machine.log("leak", engine.pid)
            what = [line.split()[0] for line in machine.log("", engine.pid)]
            assert what == ["context", "open", "open", "close", "close", "released"]
            until(lambda: not leases(), "the lease ends")
        assert closing.read_text().split("\n") == ["leased"] * 4 + [""]


def test_states_of_engines_go_to_their_gpu_only_and_take_the_place_of_the_checkpoint(
    machine: Machine, pool_name: str, folder: Path
) -> None:
    with machine.sidecar(pool_name, folder) as sidecar:
        resident(sidecar.paths, 1, {A, B})
        with machine.engine(pool_name) as engine:
            truth = engine(gpu_side.publish, "model", B)
            resident(sidecar.paths, 2, {B})
            resident(sidecar.paths, 1, {A})
            until(lambda: machine.used(B) == sum(contents(sidecar.paths, 2).segments), "the checkpoint's copy is freed on B")  # type: ignore[union-attr]
        with machine.engine(pool_name) as engine:
            assert engine(gpu_side.attach_tied, "cuda:1", "model") == truth
            assert engine(gpu_side.tied) == {
                "one object": True, "alias": True, "shared": ["large", "one", "other", "part"],
            }  # fmt: skip
            # Nobody writes to what all share.
            assert "would write to" in engine(gpu_side.refuse_writes)
            addresses = engine(gpu_side.parameters)
            assert engine(gpu_side.make_private) == (64 * 64 + 1024 * 256) * 4
            assert engine(gpu_side.tied) == {"one object": True, "alias": True, "shared": []}
            assert engine(gpu_side.refuse_writes) is None
            assert set(engine(gpu_side.parameters)).isdisjoint(addresses)
            assert engine(gpu_side.module) == truth
            engine(gpu_side.scribble)
            with machine.engine(pool_name) as other:
                assert other(gpu_side.attach_tied, "cuda:1", "model") == truth
                assert other(gpu_side.attach_tied, "cuda:0", "model") == truth  # copied there: it is another GPU's state


@pytest.mark.slow
def test_a_module_is_bound_to_a_checkpoint_on_a_gpu(machine: Machine, pool_name: str, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    Checkpoint({"w": entry("F32", (300, 500), 1), "b": entry("BF16", (500,), 2)}).write(folder / "model.safetensors")
    shapes = {"w": ([300, 500], "float32"), "b": ([500], "bfloat16")}
    with machine.sidecar(pool_name, folder) as sidecar:
        resident(sidecar.paths, 1, {A, B})
        with machine.engine(pool_name) as engine:
            truth = engine(engine_side.load, "open", "plain")
            assert engine(gpu_side.attach, "cuda:1", "plain", shapes) == truth
            assert engine(gpu_side.tied_labels) == ["b", "w"]


@pytest.mark.slow
def test_uploading_begins_while_other_files_are_still_being_loaded(machine: Machine, pool_name: str, folder: Path) -> None:
    late = folder / "1.safetensors"
    hold(late)
    environ = machine.environ(**instrumented(folder.parent, HOLDING))
    with Sidecar(pool_name, folder, args=["--device", A], env=environ) as sidecar:
        sidecar.ready("model", "loading")
        until(lambda: machine.used(A) > 0, "memory is allocated before everything is loaded")
        assert not contents(sidecar.paths).devices  # type: ignore[union-attr]
        release(late)
        resident(sidecar.paths, 1, {A})
        with machine.engine(pool_name) as engine:
            assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")


@pytest.mark.slow
def test_both_ways_of_uploading_give_the_same_bits(machine: Machine, pool_name: str, folder: Path) -> None:
    for way in ("registered", "staged"):
        with machine.sidecar(pool_name, folder, args=("--device", "cuda:0"), BALLAST_UPLOAD=way) as sidecar:
            resident(sidecar.paths, 1, {A})
            assert bool(machine.log("register")) == (way == "registered")
            with machine.engine(pool_name) as engine:
                assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")
        until(lambda: not machine.used(A), "the memory is freed with the pool")
        (machine.folder / "log").unlink()


def test_verify_reads_the_copies_back(machine: Machine, pool_name: str, folder: Path) -> None:
    with machine.sidecar(pool_name, folder) as sidecar:
        resident(sidecar.paths, 1, {A, B})
        environ = environment(pool_name, **machine.environ())
        fine = ballast("verify", "--device", "--json", env=environ)
        assert fine.returncode == 0, fine.stderr
        rows = json.loads(fine.stdout)["generations"]
        assert [row["residency"] for row in rows] == ["host", f"cuda:{A}", f"cuda:{B}"] and all(r["intact"] for r in rows)
        file = next(machine.folder.glob("alloc.1.*"))
        with open(file, "r+b") as memory:  # a bit of a tensor flips on the second GPU
            row = contents(sidecar.paths).tensors[0]  # type: ignore[union-attr]
            memory.seek(row.offset)
            byte = memory.read(1)
            memory.seek(row.offset)
            memory.write(bytes([byte[0] ^ 1]))
        damaged = ballast("verify", "--device", env=environ)
        assert damaged.returncode == 1
        assert f"on {B}" in damaged.stdout and "is damaged" in damaged.stdout
        assert ballast("verify", env=environ).returncode == 0  # host memory is what it was


def test_status_shows_where_copies_are_and_why_not(libcuda: Path, pool_name: str, folder: Path) -> None:
    machine = Machine(libcuda, {A: 64 * MIB, B: 4 * MIB})
    try:
        with machine.sidecar(pool_name, folder) as sidecar:
            resident(sidecar.paths, 1, {A})
            sidecar.says("has no copy on " + B)
            shown = ballast("status", "--json", env=environment(pool_name))
            row = json.loads(shown.stdout)["pools"][0]["generations"][0]
            assert row["devices"][A] == "resident" and "4.00 MiB are free" in row["devices"][B], row
            text = ballast("status", env=environment(pool_name)).stdout
            assert A in text and "4.00 MiB are free" in text
            with machine.engine(pool_name) as engine:
                assert engine(gpu_side.open_on, B, "model") == engine(engine_side.load, "open", "model")
                engine.says(f"is copied from host memory to {B}")
    finally:
        machine.close()


@pytest.mark.slow
def test_a_copy_is_made_once_there_is_room(libcuda: Path, pool_name: str, folder: Path) -> None:
    machine = Machine(libcuda, {A: 12 * MIB})
    try:
        with machine.engine(pool_name) as other:
            other(gpu_side.allocate, "cuda:0", 8 * MIB)
            with machine.sidecar(pool_name, folder) as sidecar:
                sidecar.says("has no copy on " + A)
                assert not contents(sidecar.paths).devices  # type: ignore[union-attr]
                other.kill()
                resident(sidecar.paths, 1, {A})
    finally:
        machine.close()


# The manifest


def a_manifest(**more: object) -> manifest.Manifest:
    return manifest.Manifest(
        generation=1, model="m", kind="checkpoint", complete=True, created=0.0, source="", segments=(2 * MIB,), tensors=[],
        **more,  # type: ignore[arg-type]
    )  # fmt: skip


COPY = DeviceCopy(A, "0123456789abcdef", (Window(bytes(range(64)), 4 * MIB, 2 * MIB),))


def test_without_copies_a_manifest_is_byte_for_byte_what_it_was() -> None:
    assert b"devices" not in manifest.encode(a_manifest())
    with_copy = manifest.encode(a_manifest(devices=(COPY,)))
    assert manifest.decode(with_copy, Path("m")).devices == (COPY,)
    assert manifest.encode(a_manifest(devices=())) == manifest.encode(a_manifest())


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "cuda:0"},
        {"gpu": A.upper()},
        {"holder": "../etc"},
        {"segments": []},
        {"segments": [["AAAA", 4 * MIB, 0]]},
        {"segments": [["not base64", 4 * MIB, 0]]},
        {"segments": [[manifest.device_row(COPY)["segments"][0][0], MIB, 0]]},
        {"segments": [[manifest.device_row(COPY)["segments"][0][0], 4 * MIB, 3 * MIB]]},
        {"segments": [[manifest.device_row(COPY)["segments"][0][0], 4 * MIB, -1]]},
        {"segments": [[manifest.device_row(COPY)["segments"][0][0], 1 << 62, 0]]},
        {"segments": [[7, 4 * MIB, 0]]},
        {"segments": 1},
    ],
    ids=str,
)
def test_hostile_copies_are_refused(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    row = {**manifest.device_row(COPY), **change}
    monkeypatch.setattr(manifest, "device_row", lambda copy: row)
    with pytest.raises(Damaged):
        manifest.decode(manifest.encode(a_manifest(devices=(COPY,))), Path("m"))


def test_a_segment_may_lie_behind_the_start_of_what_its_handle_opens() -> None:
    gpu, row = device.Gpu(0, A, "", 0), SimpleNamespace(segment=0, offset=512)
    copy = device.Copy(gpu, COPY.segments, [SimpleNamespace(pointer=1 << 40)])  # type: ignore[list-item]
    assert copy.address(row) == (1 << 40) + 2 * MIB + 512  # type: ignore[arg-type]


def test_a_handle_of_another_life_is_not_opened(machine: Machine, pool_name: str, folder: Path) -> None:
    """The manifest names a holder that is gone, or whose page has no such copy: the engine takes host memory."""
    with machine.sidecar(pool_name, folder, args=("--device", A)) as sidecar:
        resident(sidecar.paths, 1, {A})
        page = sidecar.paths.copies(next(holder.alive(sidecar.paths)).identifier, 1)
        os.kill(sidecar.pid, 19)  # SIGSTOP: so that it mends nothing
        try:
            row = json.loads(page.read_text())
            page.write_text(json.dumps({**row, "copies": []}))
            with machine.engine(pool_name) as engine:
                assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")
                engine.says("was withdrawn just now")
                assert not machine.log("open", engine.pid)
            page.write_text(json.dumps(row))
            os.kill(the_holder(sidecar.paths), 9)
            assert contents(sidecar.paths).devices  # type: ignore[union-attr]
            with machine.engine(pool_name) as engine:
                assert engine(gpu_side.open_on, "cuda:0", "model") == engine(engine_side.load, "open", "model")
                engine.says("the holder of the copy on " + A + " is gone")
                assert not machine.log("open", engine.pid)
        finally:
            os.kill(sidecar.pid, 18)
