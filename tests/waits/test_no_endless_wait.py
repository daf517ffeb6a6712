"""No path of the shim or the sidecar waits without a timeout, and none decides anything by the wall clock: read in the source.

What waits all the same, or looks at the wall clock, is listed with the reason. A new one fails the test until it is given a
timeout, or a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Names of calls that may wait for somebody else, and how many positional arguments they have when they are given a timeout.
WAITING = {
    "acquire": 1, "wait": 1, "join": 1, "result": 1, "get": 2, "communicate": 2, "flock": 9, "lockf": 9, "pause": 9,
    "sigwait": 9, "sem_wait": 9, "sem_timedwait": 9, "waitpid": 9, "run": 9, "check_call": 9, "check_output": 9,
    "accept": 9, "recv": 9, "select": 4, "poll": 1, "as_completed": 2, "barrier": 9,
}  # fmt: skip
# Calls of these names on these callees are another thing.
HARMLESS = re.compile(
    r"""^(os\.path|os\.pathsep|digest|path|["'b].*)\.join$|\.poll$  # joining texts; Popen.poll returns at once
    |^(?!.*queue).*\.get$                                          # of dictionaries, and of the catalog
    |^(Sidecar\(.*\)|_Search\(.*\)|Holder\(.*\)|demonstration|preparing|examination|holder|step)\.run$|^run$  # of ours
    """,
    re.X | re.S,
)

# file, function, call → why it may wait
EXCUSED = {
    (
        "sidecar/serve.py",
        "Sidecar._work",
        "self._queue.get",
    ): "the loader's rest; `run` ends it with None, in `finally`",
    (
        "sidecar/loader.py",
        "ShardLoader.load",
        "wait",
    ): "for reads of a file, in the loader's thread; the main thread goes on, "
    "and ends the process after END_WITHIN (test_frozen.py)",
    ("sidecar/loader.py", "ShardLoader.load", "future.result"): "done by then: `wait` came before",
    ("sidecar/pool.py", "PoolWriter._digested", "done.result"): "done by then: its executor is shut down",
}
EXCUSED |= {
    ("sidecar/anchor.py", "main", "signal.sigwait"): "it is there to wait",
    ("sidecar/cuda.py", "Gpu._upload_staged", "future.result"): "calls of the driver, in the holder's own process. Who gave up "
    "on one could not know until when it writes; SIGKILL ends the holder, and its copies with it",
}
# Commands that a person runs and looks at; Ctrl-C ends them.
WATCHED = ("sidecar/demo.py", "sidecar/demo_engine.py")

# Locks among the threads of one process, taken by `with`: what is done under them waits for nobody, or with a timeout.
THREAD_LOCKS = {
    "engine_shim/device.py": {"_lock"},
    "engine_shim/onboard.py": {"_lock"},
    "engine_shim/ladder.py": {"self._lock", "_pools_lock"},
    "engine_shim/handoff/hugepages.py": {"self._lock"},
    "sidecar/budget.py": {"pool.lock"},
    "sidecar/history.py": {"pool.lock"},
    "sidecar/pool.py": {"self.lock"},
    "sidecar/progress.py": {"self._lock"},
    "sidecar/serve.py": {"lock", "self._pool.lock"},
}

# Where the wall clock is read: for people, unless it says otherwise.
WALL_CLOCK = {
    ("engine_shim/handoff/holder.py", "Token.__init__"): "`since` of a record",
    ("sidecar/pool.py", "PoolWriter.again"): "`since`",
    ("sidecar/holder.py", "Holder._settling"): "how long ago an engine claimed a GPU; wrong, memory is measured sooner",
    ("sidecar/budget.py", "Budget.look"): "which model was used last, to choose what is evicted first",
    ("engine_shim/handoff/attachment.py", "Token.take"): "`since` of a record",
    ("engine_shim/handoff/publication.py", "Publication.commit"): "`created`",
    ("sidecar/pool.py", "PoolWriter.begin"): "`since`",
    ("sidecar/pool.py", "PoolWriter.publish"): "`since`",
    ("sidecar/pool.py", "PoolWriter.fail"): "`since`",
    ("sidecar/pool.py", "_retired"): "`since`",
    (
        "sidecar/serve.py",
        "plan",
    ): "`created`; and whether a file's times are old enough to be told from later ones. A clock that "
    "is wrong makes them worth nothing, and contents are compared instead (test_clock.py)",
    ("sidecar/serve.py", "_wait_until_settled"): "the same; waits by the monotonic clock",
    ("sidecar/loader.py", "ShardLoader._unchanged"): "the same",
    ("sidecar/status.py", "show"): "ages that are shown",
}


class Finder(ast.NodeVisitor):
    """Calls, `with` statements, and the functions they are in."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self.calls: list[tuple[str, ast.Call]] = []
        self.contexts: list[tuple[str, str]] = []

    def _scope(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_FunctionDef = visit_ClassDef = _scope

    def visit_Call(self, node: ast.Call) -> None:
        self.calls.append((".".join(self._names), node))
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        self.contexts += [(".".join(self._names), ast.unparse(item.context_expr)) for item in node.items]
        self.generic_visit(node)


def sources() -> Iterator[tuple[str, Finder]]:
    for folder in ("engine_shim", "sidecar"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            finder = Finder()
            finder.visit(ast.parse(path.read_text()))
            yield path.relative_to(ROOT).as_posix(), finder


def endless(call: ast.Call) -> bool:
    """Whether this call may wait for ever."""
    callee = ast.unparse(call.func)
    name = callee.rsplit(".", 1)[-1]
    if name not in WAITING or HARMLESS.search(callee):
        return False
    if name in ("flock", "lockf"):
        return "LOCK_NB" not in ast.unparse(call)
    keywords = {keyword.arg for keyword in call.keywords}
    if keywords & {"timeout", None}:
        return False
    if name == "acquire" and any(k.arg == "blocking" and ast.unparse(k.value) == "False" for k in call.keywords):
        return False
    own = isinstance(call.func, ast.Name)  # concurrent.futures.wait: what is waited for comes first
    return len(call.args) < WAITING[name] + own


def test_no_call_waits_for_ever() -> None:
    found = set()
    for file, finder in sources():
        if file not in WATCHED:
            found |= {(file, where, ast.unparse(call.func)) for where, call in finder.calls if endless(call)}
    assert found - set(EXCUSED) == set(), "these wait without a timeout"
    assert set(EXCUSED) - found == set(), "these are excused and not there"


def test_what_is_found() -> None:
    """That the test above would see something."""

    def waits(source: str) -> bool:
        [call] = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        return endless(call)

    for source in (
        "semaphore.acquire()", "lock.acquire()", "thread.join()", "event.wait()", "process.wait()", "self._queue.get()",
        "fcntl.flock(fd, fcntl.LOCK_EX)", "future.result()", "process.communicate()", "signal.pause()", "wait(futures)",
        "subprocess.run(command)", "_libc.sem_timedwait(a, b)", "self._queue.get(True)", "os.waitpid(pid, 0)",
    ):  # fmt: skip
        assert waits(source), source
    for source in (
        "semaphore.acquire(0.2)", "lock.acquire(blocking=False)", "thread.join(5)", "event.wait(timeout=1)", "', '.join(a)",
        "fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)", "wait(futures, timeout=3)", "d.get(key)", "os.path.join(a)",
        "subprocess.run(command, timeout=3)", "process.poll()", "self._queue.get(timeout=1)",
    ):  # fmt: skip
        assert not waits(source), source


def test_locks_of_the_kernel_are_never_waited_for() -> None:
    """OFD locks have a waiting form, flock has one, opening a FIFO waits, and so does posix_ipc by the wall clock."""
    for file, finder in sources():
        text = (ROOT / file).read_text()
        assert "SETLKW" not in text, file
        for where, call in finder.calls:
            if ast.unparse(call.func) == "semaphore.acquire":
                assert ast.unparse(call) == "semaphore.acquire(0)", f"{file} {where}"
            if ast.unparse(call.func) == "os.open" and file.startswith("engine_shim/handoff"):
                assert "O_NONBLOCK" in ast.unparse(call) or "O_EXCL" in ast.unparse(call), f"{file} {where}"


def test_locks_of_threads_are_known() -> None:
    """`with lock:` waits for ever too; so these are few, and looked at."""
    for file, finder in sources():
        if file in WATCHED:
            continue
        locks = {context for _, context in finder.contexts if re.search(r"lock\b", context)}
        assert locks <= THREAD_LOCKS.get(file, set()), file


def test_nothing_is_decided_by_the_wall_clock() -> None:
    found = set()
    for file, finder in sources():
        for where, call in finder.calls:
            if re.fullmatch(
                r"time\.(time|time_ns|localtime|gmtime)|datetime\..*(now|today|utcnow)", ast.unparse(call.func)
            ):
                found.add((file, where))
    assert found == set(WALL_CLOCK)


def test_handlers_of_signals_only_take_notes() -> None:
    """They run between any two steps of the main thread, also while it holds a lock: `Event.set` in one waits for ever then."""
    checked = 0
    for file, finder in sources():
        if file in WATCHED:
            continue
        handlers = {
            ast.unparse(call.args[1]).rsplit(".", 1)[-1]
            for _, call in finder.calls
            if ast.unparse(call.func) == "signal.signal"
        }
        for function in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(function, ast.FunctionDef) and function.name in handlers:
                checked += 1
                assert all(isinstance(step, (ast.Assign, ast.AugAssign)) for step in function.body), f"{file} {function.name}"
                assert not any(isinstance(node, ast.Call) for step in function.body for node in ast.walk(step)), function.name
    assert checked
