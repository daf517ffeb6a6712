"""The start of one model in one rank of an engine: what the pool has for it, and what becomes of it.

An engine's adapter tells when the model is built (`weights`) and when it is ready to run (`loaded`, `end`). In between, either
a published state of exactly this key is bound, or the engine reads its weights itself and what they became is kept. What goes
wrong before the model is touched leaves the engine with a built model whose weights are to be read; what goes wrong later is
raised, and the adapter has the model built once more.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping, Optional

import torch

from engine_shim import device, ladder, modules, parity, state
from engine_shim.handoff.errors import HandoffError, Mismatch, NotFound
from engine_shim.handoff.names import PoolPaths
from engine_shim.handoff.room import gib
from engine_shim.ladder import Settings
from engine_shim.state import Found, Keeper
from engine_shim.weight_files import OTHER, Weights

log = logging.getLogger("ballast")

_ADOPTION = 600.0  # seconds that a publisher looks after its publication, and `ballast prepare` waits for it


@dataclass(frozen=True)
class Place:
    """Where in an engine a model is loaded. `rank` counts within one replica; `role` tells target and drafts apart;
    `expected` is how many such places report to `ballast prepare` on this machine."""

    rank: int = 0
    role: str = "target"
    replica: int = 0
    expected: int = 1


def looks_for_states() -> bool:
    """Whether a published state may be used; without (BALLAST_STATE=0) the engine reads its weights itself."""
    return os.environ.get("BALLAST_STATE", "1").strip().lower() not in ("0", "off", "no", "false")


class Start:
    """See the module's first lines. `engine` is the engine's name as people write it. An adapter overrides what is otherwise
    in its engine: `variant`, `levels`, `check`."""

    variant = "final"  # post-processing of another variant has another result, from the same captured state
    gpu: Optional[device.Gpu] = None  # where the engine's weights are to lie; None for host memory
    remark = ""  # at the end of the line that says that an engine is attached

    def __init__(
        self, settings: Settings, engine: str, weights: Weights, key: Mapping[str, Any], place: Place, paths: PoolPaths
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.name = weights.model
        self.content = weights.content
        # Whether the weight files are still those that the key tells of.
        self.unchanged: Optional[Callable[[], bool]] = lambda: weights.unchanged(ladder.pool(paths))
        self.key = key
        self.place = place
        self.paths = paths
        self.digest = modules.key_digest(key)
        self.label = f"{engine.lower()} {key['version']} rank {place.rank}"
        self.rung = parity.own(engine)
        self.found: Optional[Found] = None
        self.keeper: Optional[Keeper] = None
        self.taken = 0.0
        self.mapped = False  # whether the state comes to a GPU: the model is built without memory then, or would need it twice
        self.touched = False  # whether the model has held anything of ours: if it has, a failure may be our fault
        self._look()

    def _look(self) -> None:
        if not looks_for_states():
            return
        try:
            self.found = self._find()
            self.touched = self.mapped = self.found is not None and self.gpu is not None
        except HandoffError as error:
            log.warning("the state of %s in the pool cannot be used: %s", self.name, error)
            return
        if self.found is None:
            other = state.differences(self.key, self.paths)
            why = f" (the nearest one differs in {other})" if other else ""
            log.info("the pool holds no state of %s for this configuration yet%s", self.name, why)

    def _find(self) -> Optional[Found]:
        return state.find(self.digest, self.label, self.paths, self.gpu, self.content)

    def levels(self, model: torch.nn.Module) -> Mapping[str, str]:
        """Path -> level of what is captured after post-processing. Raises Mismatch if `model` cannot be kept."""
        state.check_seen_nowhere_else(model)
        return {}

    def check(self, model: torch.nn.Module, found: Found) -> None:
        """Raises Mismatch if `found` cannot be bound in this engine, although the key is equal."""
        state.check_seen_nowhere_else(model)

    def _check_files(self) -> None:
        """Raises Mismatch if the weight files were exchanged while the engine read them."""
        unchanged, self.unchanged = self.unchanged, None
        if unchanged is not None and not unchanged():
            raise Mismatch("its weight files were changed while they were read")

    # While the engine loads

    def weights(self, model: torch.nn.Module, by_engine: Callable[[], Any]) -> Any:
        """Binds, or has the engine read the weights, into shared memory where they are to be kept. What `by_engine` returns."""
        if self.found is not None and self._bind(model, self.found):
            self.tell(model, "loaded")
            return None
        self.refuse_mapped()
        self._prepare_keeping(model)
        result = by_engine()
        self.tell(model, "loaded")
        if self.keeper is not None:
            try:
                self._check_files()
                self.keeper.loaded(model)
            except Exception as error:
                self.give_up_keeping(error)
        return result

    def refuse_mapped(self) -> None:
        """Raises Mismatch if the model was built for a state in device memory, which is not used after all."""
        if self.mapped:
            raise Mismatch("the model was built without memory for a state that is not used; it is built again")

    def tell(self, model: torch.nn.Module, stage: str) -> None:
        """For `ballast parity`."""
        if parity.wanted():
            parity.dump(model, stage, self.place.rank, self.place.role, self.rung)

    def _bind(self, model: torch.nn.Module, found: Found) -> bool:
        """Whether the state fits. Raises what goes wrong once the model is touched: it is to be built anew then."""
        began = time.perf_counter()
        try:
            self.touched = True
            self.check(model, found)
            found.bind(model)
        except HandoffError as error:  # nothing is touched
            log.warning("the state of %s in the pool is not used: %s: %s", self.name, type(error).__name__, error)
            log.debug("the whole story", exc_info=True)
            self.found = None
            return False
        self.rung = found.level
        self.taken = time.perf_counter() - began
        return True

    def _prepare_keeping(self, model: torch.nn.Module) -> None:
        if not self.settings.publish:
            return
        try:
            if not ladder.pool(self.paths).control().sidecar_alive:
                raise NotFound(f"pool {self.paths.pool!r} has no living sidecar")
            self.keeper = Keeper(self.name, self.paths, self.levels(model))
            self.touched = True
            self.keeper.move(model)
        except Exception as error:
            self.give_up_keeping(error)

    def give_up_keeping(self, error: BaseException) -> None:
        log.warning("the state of %s is not published: %s", self.name, error)
        log.debug("the whole story", exc_info=True)
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    # Afterwards

    def loaded(self, model: torch.nn.Module) -> None:
        """Raises Mismatch unless an attached model came out of its post-processing as the published one did."""
        if self.found is not None:
            self.found.check_final(model, self.variant)

    def close(self) -> None:
        """The model is not used: lets go of everything."""
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    def end(self, model: torch.nn.Module) -> None:
        """The model is loaded. Says so, and hands over what was kept, in the background. Never raises."""
        try:
            if self.found is not None:
                contents = self.found.contents
                log.info(
                    "%s comes from memory as it was after loading (%s): generation %d of pool %s, %s, bound in %.1f ms%s",
                    self.name, self.rung, contents.generation, self.paths.pool, gib(contents.nbytes), 1000 * self.taken,
                    self.remark,
                )  # fmt: skip
                self.attached(model, self.found)
                self.report("attached")
            self.tell(model, "final")
            if self.keeper is not None:
                self._hand_over(model, self.keeper)
            elif self.found is None:
                self.report("not published")
        except Exception as error:
            self.give_up_keeping(error)
            self.report("failed")

    def attached(self, model: torch.nn.Module, found: Found) -> None:
        """The model runs on shared bytes from now on."""
        _sharing[model] = (self.paths, found.generation.number)

    def _hand_over(self, model: torch.nn.Module, keeper: Keeper) -> None:
        description = keeper.finish(model, self.variant)
        if self.gpu is not None:
            description["gpu"] = self.gpu.uuid
        if self.content not in ("", OTHER):
            description["content"] = self.content
        self.keeper = None
        committed = threading.Event()
        reference = weakref.ref(model)

        def commit() -> None:
            try:
                if state.exists(self.digest, self.paths, self.content):  # replicas that start together have the same state
                    log.info("the state of %s is in pool %s by now: another start was quicker", self.name, self.paths.pool)
                    self.report("attached")
                    return
                if not ladder.pool(self.paths).control().sidecar_alive:
                    raise NotFound(f"the sidecar of pool {self.paths.pool!r} has died meanwhile")
                keeper.commit(description, self.key, self.digest)
                log.info("published the state of %s to pool %s (%s)", self.name, self.paths.pool, gib(keeper.nbytes))
                committed.set()
            except Exception as error:
                log.warning("the state of %s is not published: %s", self.name, error)
                log.debug("the whole story", exc_info=True)
                self.report("failed")
            finally:
                keeper.close()

        def follow() -> None:
            publishing.join(_ADOPTION)
            if not committed.is_set():
                return  # and `commit` has said why
            try:
                generation = state.adopted(keeper, self.digest, _ADOPTION)
                self.report("published", generation.number)
                # This engine runs on those very bytes now: say so, so that `ballast status` shows who keeps them in memory.
                contents = ladder.pool(self.paths).manifest(generation)
                _held.append(ladder.pool(self.paths).attach(generation, contents, engine=self.label))
                running = reference()
                if running is not None:
                    _sharing[running] = (self.paths, generation.number)
            except Exception as error:
                log.warning("the published state of %s is not in service: %s", self.name, error)
                self.report("failed")

        # The first is short and is waited for when the engine ends at once; the second may last, and is not.
        publishing = threading.Thread(target=commit, name="ballast-publish")
        publishing.start()
        threading.Thread(target=follow, name="ballast-follow", daemon=True).start()

    def report(self, outcome: str, generation: Optional[int] = None) -> None:
        """For `ballast prepare`, which waits for every rank of every model that the engine loads."""
        folder = os.environ.get("BALLAST_PREPARE")
        if not folder:
            return
        with contextlib.suppress(OSError):
            place = self.place
            path = Path(folder, f"{place.role}-{place.replica}-{place.rank}.json")
            row = {
                "outcome": outcome, "rank": place.rank, "role": place.role, "model": self.name, "generation": generation,
                "ranks": place.expected, "roles": 1,
            }  # fmt: skip
            new = path.with_suffix(".tmp")
            new.write_text(json.dumps(row))
            new.rename(path)


_held: list[Any] = []  # attachments of this process that nothing else keeps
# Which generation a running model's bytes are those of.
_sharing: weakref.WeakKeyDictionary[torch.nn.Module, tuple[PoolPaths, int]] = weakref.WeakKeyDictionary()


def no_longer_shared(model: torch.nn.Module, why: str, private: int = 0) -> None:
    """The engine has written to a model that runs on shared bytes: pages it wrote to are its own now, and the shared copy is as
    it was; on a device the `private` bytes were copied before. Said once in the log, and in the attachment's note, where
    `ballast status` shows it. Never raises."""
    try:
        shared = _sharing.pop(model, None)
        if shared is None:
            return
        paths, generation = shared
        own = private + state.own_bytes(paths, generation)
        log.warning(
            "%s: this engine's weights are no longer shared (%s of them are its own copy now); generation %d of pool %s is as "
            "it was, and restarting the engine attaches to it again",
            why, gib(own), generation, paths.pool,
        )  # fmt: skip
        ladder.pool(paths).note(generation, f"no longer shared: {why}")
    except Exception as error:
        log.warning("%s, and it could not be noted: %s", why, error)
