"""The command line `ballast`: reads arguments and environment, calls the part that does the work, names the exit code.

Every command returns its exit code: 0 done, 1 failed, 2 bad usage, 3 not ready or not found. Errors become one sentence on
stderr, in `main` and nowhere else. What a command needs is imported when it runs: `ballast --help` is to be quick and the
process of `ballast serve` small.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import engine_shim
from engine_shim import __version__
from engine_shim.handoff.errors import HandoffError, NameRefused, NotFound, NotReady
from engine_shim.handoff.names import DEFAULT_DIR, DEFAULT_POOL, PoolPaths

if TYPE_CHECKING:
    from rich.console import Console

log = logging.getLogger("ballast")

DONE, FAILED, USAGE, NOT_READY = 0, 1, 2, 3
INTERRUPTED = 130  # 128 + SIGINT, as a shell has it
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

# What `ballast run` puts on the PYTHONPATH of the engine.
SITE = Path(engine_shim.__file__).resolve().parent / "hooks" / "site"

_PIPED_WIDTH = 100_000  # columns of a table that no terminal limits: whoever searches it finds whole notes

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\
A first round: ballast serve /models/llama & ballast wait && ballast run -- python my_engine.py

Exit codes: 0 done, 1 failed, 2 bad usage, 3 not ready or not found.""",
)


class OnExit(str, enum.Enum):
    """What becomes of the pool when its sidecar stops."""

    keep = "keep"
    remove = "remove"


class Mode(str, enum.Enum):
    """What an engine does where the pool cannot serve it."""

    auto = "auto"
    require = "require"
    off = "off"


def _complete_pool(incomplete: str) -> list[str]:
    from engine_shim.handoff.names import pools

    return [pool for pool in pools(Path(os.environ.get("BALLAST_DIR") or DEFAULT_DIR)) if pool.startswith(incomplete)]


def _complete_model(ctx: typer.Context, incomplete: str) -> list[str]:
    from sidecar import status

    try:
        now = status.look(PoolPaths.from_environment(pool=ctx.params.get("pool")))
    except HandoffError:
        return []
    return sorted({g.model for g in now.generations if g.model.startswith(incomplete)})


Pool = Annotated[
    str, typer.Option("--pool", "-p", envvar="BALLAST_POOL", help="Name of the pool.", autocompletion=_complete_pool)
]
AnyPool = Annotated[
    str | None,
    typer.Option(
        "--pool",
        "-p",
        envvar="BALLAST_POOL",
        help="Name of the pool; all pools if none is named.",
        show_default=False,
        autocompletion=_complete_pool,
    ),
]
Dir = Annotated[
    Path,
    typer.Option(
        "--dir", envvar="BALLAST_DIR", help="Directory of the pool's objects, on a memory file system (tmpfs)."
    ),
]
OneModel = Annotated[
    str, typer.Argument(metavar="NAME", help="The model.", show_default=False, autocompletion=_complete_model)
]
AnyModel = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="The model; every model of the pool if none is named.",
        show_default=False,
        autocompletion=_complete_model,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ballast {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def ballast(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keeps a model's weights aboard while inference engines come and go.

    A sidecar ('ballast serve') loads checkpoints into shared memory once.

    Engines that are started with BALLAST_POOL set ('ballast run') attach to them in milliseconds instead of loading.
    """
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(USAGE)


# The sidecar ----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="""\
Serve one model: ballast serve /models/llama

Two models under names of your own: ballast serve /models/a /models/b --name base --name tuned

One file: ballast serve weights/model.safetensors --name m

Stop it with Ctrl-C and the pool is removed; with kill and the next sidecar takes it over in milliseconds."""
)
def serve(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            show_default=False,
            help="Directories with .safetensors files, single .safetensors files, or index files.",
        ),
    ],
    pool: Pool = DEFAULT_POOL,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            "-n",
            show_default=False,
            help="Name of a model in the pool; one for each checkpoint, in the same order. Default: from its path.",
        ),
    ] = None,
    directory: Dir = Path(DEFAULT_DIR),
    device: Annotated[
        str | None,
        typer.Option(
            envvar="BALLAST_DEVICE",
            show_default=False,
            help="Also keep copies on GPUs: cuda:all, cuda:0,1, or UUIDs (GPU-…, MIG-…). Needs the extra 'cuda'.",
        ),
    ] = None,
    on_exit: Annotated[
        OnExit | None,
        typer.Option(
            show_default=False,
            help="What becomes of the pool when the sidecar stops. Default: SIGTERM keeps it, SIGINT (Ctrl-C) removes it.",
        ),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="What the pool may take of memory, like 40G. Models that nobody uses go when another is asked for.",
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", show_default=False, help="A model that stays in memory whatever else is asked for."),
    ] = None,
    scrub: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            show_default=False,
            help="Check every byte in memory this often, like 6h, slowly; what is damaged is replaced from its files.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|GID",
            show_default=False,
            help="Let members of this group attach, who set BALLAST_TRUST to this sidecar's user. They can change nothing.",
        ),
    ] = None,
) -> int:
    """Load checkpoints into shared memory and keep them there: the sidecar.

    Publishes what it has loaded, watches the files for new content, and adopts what a killed sidecar left.

    Stays in the foreground until it is stopped.
    """
    from sidecar import progress
    from sidecar.budget import Budget, parse_size
    from sidecar.scrub import parse_duration
    from sidecar.serve import Sidecar, name_models

    paths = _paths(pool, directory)
    if group is not None:
        paths = PoolPaths(paths.pool, paths.dir, _gid(group))
    models = name_models(checkpoints, name or [])
    for strange in sorted(set(pin or ()) - {model.name for model in models}):
        held = ", ".join(model.name for model in models)
        raise NameRefused(f"--pin {strange}: this sidecar serves no such model but {held}")
    every = None if scrub is None else parse_duration(scrub)
    budget = Budget(None if max_bytes is None else parse_size(max_bytes), pin or ())
    if device is not None:
        _check_device(device)
    on = None if on_exit is None else on_exit.value
    if not progress.is_terminal():
        return Sidecar(paths, models, on, progress.Lines(), budget, device, every).run()
    console = _console(stderr=True)
    bars = progress.Bars(console)
    _log_to(progress.BarsHandler(console))
    try:
        return Sidecar(paths, models, on, bars, budget, device, every).run()
    finally:
        bars.close()


@app.command(
    epilog="""\
After an update that turned out bad: ballast rollback llama

The same again goes forward. Programs that open files by path get what those files hold: put the older ones back as well.

Exit codes: 1 there is no older generation, 3 no sidecar answers."""
)
def rollback(name: OneModel, pool: Pool = DEFAULT_POOL, directory: Dir = Path(DEFAULT_DIR)) -> int:
    """Serve what the previous generation of a model holds; it stays so until its files change again.

    Copies nothing. Engines that are attached keep what they have; new ones that ask for the model by name get the older one.
    """
    from engine_shim.handoff import request

    print(request.ask(_paths(pool, directory), request.ROLLBACK, name))
    return DONE


@app.command(epilog="In a container of its own, beside the sidecar's: ballast hold --device cuda:all")
def hold(
    device: Annotated[
        str, typer.Option(envvar="BALLAST_DEVICE", help="cuda:all, cuda:0,1, or UUIDs (GPU-…, MIG-…).")
    ] = "cuda:all",
    pool: Pool = DEFAULT_POOL,
    wait: Annotated[bool, typer.Option(help="Wait for a pool that is not there yet.")] = True,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Own the device copies of a pool: the process that 'ballast serve --device' starts by itself.

    Started on its own, it lets the sidecar be stopped and updated without engines losing what they have mapped.

    Stays in the foreground until the pool is removed, or it is stopped and no engine uses its memory any more.
    """
    from sidecar import holder

    _check_device(device)
    return holder.run(_paths(pool, directory), device, wait)


def _check_device(spec: str) -> None:
    from sidecar import cuda

    try:
        cuda.parse(spec)
    except ValueError as error:
        raise NameRefused(str(error)) from None


# Engines --------------------------------------------------------------------------------------------------------------


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="""\
Start an engine: ballast run -- python my_engine.py --port 8000

Stop rather than load from disk: ballast run --mode require -- vllm serve /models/llama

The command replaces this process: signals, standard streams and the exit code are the engine's own.""",
)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", show_default=False, help="The engine, with its arguments.")
    ],
    pool: Pool = DEFAULT_POOL,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            envvar="BALLAST_MODEL",
            show_default=False,
            autocompletion=_complete_model,
            help="Name of the model in the pool, where it cannot be told from the engine's checkpoint files.",
        ),
    ] = None,
    mode: Annotated[
        Mode,
        typer.Option(
            envvar="BALLAST_MODE",
            case_sensitive=False,
            help="Where the pool cannot serve: auto loads as without Ballast, require stops, off never asks the pool.",
        ),
    ] = Mode.auto,
    wait: Annotated[
        float | None,
        typer.Option(
            envvar="BALLAST_WAIT",
            min=0,
            show_default="600",
            help="Seconds that the engine waits for a sidecar that is still loading.",
        ),
    ] = None,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Start an engine with the shim switched on, in any Python that the command leads to.

    Sets BALLAST_POOL and its like, and puts the shim on PYTHONPATH: the engine's Python need not have Ballast installed.
    """
    paths = _paths(pool, directory)
    environ = dict(os.environ)
    environ.update(BALLAST_POOL=paths.pool, BALLAST_MODE=mode.value)
    if model is not None:
        environ["BALLAST_MODEL"] = model
    if wait is not None:
        environ["BALLAST_WAIT"] = f"{wait:g}"
    if paths.dir != Path(DEFAULT_DIR) or "BALLAST_DIR" in environ:
        environ["BALLAST_DIR"] = str(paths.dir)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), environ.get("PYTHONPATH"))))
    if mode is not Mode.off and (option := _isolated(command)):
        line = f"{command[0]} is started with {option}, which keeps the shim out of it: leave {option} away"
        if mode is Mode.require:
            return _say(f"{line} (--mode require: not starting it without Ballast)", FAILED)
        _say(f"{line} (starting it without Ballast)", DONE)
    return _exec(command, environ)


def _isolated(command: list[str]) -> str:
    """The option by which a Python, called so or by a script's #! line, starts without the shim; "" if there is none."""
    import shutil
    import subprocess

    from engine_shim.doctor import isolation

    python = command
    program = shutil.which(command[0])
    if program is not None:
        try:
            with open(program, "rb") as file:
                first = file.readline(256)
        except OSError:
            first = b""
        if first.startswith(b"#!"):
            python = first[2:].decode(errors="replace").split()
            if python and os.path.basename(python[0]) == "env":
                python = [word for word in python[1:] if not word.startswith("-S") and "=" not in word]
    option = isolation(python)
    if option in ("-I", "-E"):  # the environment is not looked at, but the shim may be installed in that Python
        look = [python[0], option, "-c", "import engine_shim"]
        try:
            if subprocess.run(look, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0:
                return ""
        except (OSError, subprocess.TimeoutExpired):
            pass
    return option


def _exec(command: list[str], environ: dict[str, str]) -> int:
    """Becomes the command. Returns, with an exit code, only if that cannot be done."""
    import signal

    sys.stdout.flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a new program inherits that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environ)
    except FileNotFoundError:
        return _say(f"there is no command {command[0]!r}: check its name, PATH, and its #! line", NOT_READY)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return _say(f"{command[0]!r} cannot be started ({why}): is it an executable program?", FAILED)


@app.command(
    epilog="""\
As a container's probe: ballast wait llama --timeout 0

Before an engine: ballast wait llama --timeout 300 && ballast run -- python my_engine.py

Exit codes: 0 ready, 1 the sidecar could not load it, 3 not there or not ready in time."""
)
def wait(
    name: AnyModel = None,
    pool: Pool = DEFAULT_POOL,
    timeout: Annotated[float, typer.Option("--timeout", "-t", min=0, help="Seconds to wait.")] = 600,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Wait until a model can be attached to. The pool need not be there yet."""
    from sidecar import progress, status

    paths = _paths(pool, directory)
    if not progress.is_terminal():
        status.wait_until_ready(paths, name, timeout, progress.Lines())
        return DONE
    bars = progress.Bars(_console(stderr=True))
    try:
        status.wait_until_ready(paths, name, timeout, bars)
    finally:
        bars.close()
    return DONE


# Looking --------------------------------------------------------------------------------------------------------------


@app.command("status", epilog="For a script: ballast status --json | jq '.pools[].generations[] | .model, .state'")
def show_status(pool: AnyPool = None, json: Json = False, directory: Dir = Path(DEFAULT_DIR)) -> int:
    """Show pools: their models, who is attached, room left, and what is left over from processes that were killed."""
    from engine_shim.handoff.names import pools
    from sidecar import status

    names = [pool] if pool is not None else pools(directory)
    found = []
    for name in names:
        try:
            found.append(status.look(_paths(name, directory)))
        except NotFound:
            if pool is not None:
                raise
    if json:
        _print_json({"ballast": __version__, "pools": [one.as_json() for one in found]})
        return DONE
    console = _console()
    for one in found:
        status.show(one, console)
    if not found:
        console.print(f"no pool in {directory}; start one with 'ballast serve'", markup=False, highlight=False)
    return DONE


@app.command(epilog="For a script: ballast manifest llama --json | jq '.tensors[].name'")
def manifest(
    name: OneModel,
    pool: Pool = DEFAULT_POOL,
    generation: Annotated[
        int | None,
        typer.Option(
            "--generation", "-g", min=0, help="Number of the generation. Default: the newest.", show_default=False
        ),
    ] = None,
    json: Json = False,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Show a model's manifest: its tensors, where they are, and their digests."""
    from sidecar import status

    contents = status.find_manifest(_paths(pool, directory), name, generation)
    if json:
        _print_json(status.manifest_json(contents))
        return DONE
    for line in status.manifest_lines(contents):
        print(line)
    return DONE


@app.command(epilog="After a suspicious crash: ballast verify && echo every byte is as it was published")
def verify(
    name: AnyModel = None,
    pool: Pool = DEFAULT_POOL,
    device: Annotated[bool, typer.Option("--device", help="Read the copies on GPUs back as well.")] = False,
    json: Json = False,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Compute the digests of what is in memory again, and name every tensor that is not as it was published.

    Exit codes: 0 all is intact, 1 something is damaged, 3 there is nothing to verify.
    """
    from engine_shim.handoff.room import gib
    from sidecar import status

    checked = list(status.verify(_paths(pool, directory), name, device))
    if json:
        _print_json({"generations": [one.as_json() for one in checked]})
    else:
        for one in checked:
            where = "" if one.residency == "host" else f" on {one.residency.partition(':')[2]}"
            label = f"{one.model}, generation {one.generation}{where}"
            for tensor in one.damaged:
                print(f"{label}: {status.printable(tensor)} is damaged")
            if one.problem:
                print(f"{label}: {one.problem}")
            elif not one.damaged:
                print(f"{label}: {one.tensors} tensors are intact ({gib(one.bytes)} in {one.seconds:.1f} s)")
    if all(one.intact for one in checked):
        return DONE
    what = ", ".join(f"{one.model} ({one.generation})" for one in checked if not one.intact)
    return _say(f"{what} is not as it was published: stop its sidecar, run 'ballast purge', start it again", FAILED)


@app.command(epilog="In an engine's container that holds only the shim: python -m engine_shim doctor")
def doctor(pool: Pool = DEFAULT_POOL, json: Json = False, directory: Dir = Path(DEFAULT_DIR)) -> int:
    """Find out why an engine does not attach: whose /dev/shm this is, its size, users, the sidecar, the shim.

    Run it where the engine runs, in its container and with its environment. Exit codes: 0 nothing to mend, 1 faults.
    """
    from engine_shim import doctor as examination

    # Without BALLAST_POOL this is a sidecar's shell or an operator's, where no shim is expected to be on.
    return examination.run(_paths(pool, directory), json, engine="BALLAST_POOL" in os.environ)


# Engines' containers --------------------------------------------------------------------------------------------------


@app.command(
    epilog="""In an init container: ballast inject /ballast

The engine, with the same volume: PYTHONPATH=/ballast BALLAST_POOL=main python my_engine.py"""
)
def inject(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", show_default=False, help="The shared volume, where it is mounted here.")
    ],
) -> int:
    """Put the shim into a volume that an engine's container shares: its image need not be rebuilt.

    The engine needs PYTHONPATH=DIR (as it has it mounted) and BALLAST_POOL. Any Python from 3.9 on will do there.
    """
    from sidecar import inject as injecting

    done = injecting.inject(Path(os.path.abspath(folder)))
    print(f"{done.directory} {'now has' if done.changed else 'already had'} the shim ({done.copy})")
    print("start the engine with PYTHONPATH set to this folder, as it sees it, and BALLAST_POOL set to the pool's name")
    return DONE


# Cleaning up ----------------------------------------------------------------------------------------------------------


@app.command(epilog="After a crashed test run: ballast purge --all --force")
def purge(
    pool: Pool = DEFAULT_POOL,
    everything: Annotated[bool, typer.Option("--all", help="Every pool of the directory instead of one.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", "-f", help="Even if engines are attached, or nothing is there; as root, anybody's pool."),
    ] = False,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Remove a pool that has no sidecar any more. Engines that are attached keep their weights until they end.

    Refuses while the sidecar is running, and, without --force, while engines are attached. Root removes another user's pool
    with --force.
    """
    from engine_shim.handoff.names import pools
    from sidecar import pool as pool_writer
    from sidecar import status

    code = DONE
    for name in pools(directory) if everything else [pool]:
        paths = _paths(name, directory)
        if not force and not everything and not status.exists(paths):
            raise NotFound(f"there is no pool {name!r} in {directory}: nothing was removed")
        try:
            count = pool_writer.purge(paths, force)
            print(f"removed pool {name}: {count} objects")
        except HandoffError as error:
            if not everything:
                raise
            code = _say(error, FAILED)
    return code


# Trying it ------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Directory that keeps the demo's checkpoint. Default: ballast in $XDG_CACHE_HOME.", show_default=False
        ),
    ] = None,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Show the whole on a real model: load from disk, attach, attach again after kill -9 of engine and sidecar.

    Takes a pool of its own, and leaves nothing but the checkpoint in its cache directory. Needs the extra 'demo'.
    """
    from sidecar import demo as demonstration

    try:
        return demonstration.run(cache or _cache(), Path(os.path.abspath(directory)), _console())
    except demonstration.DemoFailed as error:
        return _say(error, FAILED)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ballast"


# Engines' own state ---------------------------------------------------------------------------------------------------

EngineCommand = Annotated[
    list[str], typer.Argument(metavar="COMMAND", show_default=False, help="The engine, with its arguments.")
]


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Before the first serving start: ballast prepare -- vllm serve /models/llama",
)
def prepare(
    command: EngineCommand,
    pool: Pool = DEFAULT_POOL,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds until the state must be there.")] = 1800.0,
    directory: Dir = Path(DEFAULT_DIR),
) -> int:
    """Run an engine only until every rank has published its state, so that every serving start attaches."""
    from sidecar import prepare as preparing

    log = sys.stderr.fileno()
    for row in preparing.prepare(command, pool, directory=Path(os.path.abspath(directory)), timeout=timeout, log=log):
        where = "was there already" if row.outcome == "attached" else f"is generation {row.generation}"
        print(f"{row.model}, {row.role}, rank {row.rank}: its state {where}")
    return DONE


@app.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Before trusting a new format: ballast parity -- vllm serve /models/llama",
)
def parity(
    command: EngineCommand,
    pool: Annotated[
        str | None,
        typer.Option("--pool", "-p", help="A pool with the checkpoint; by default one is made.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Greedy tokens of each answer that is compared.")] = 32,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds that one start may take.")] = 900.0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the engines write.")] = False,
    directory: Dir = Path(DEFAULT_DIR),
    json: Json = False,
) -> int:
    """Compare an engine from disk with the same engine by way of the pool: every tensor, and greedy tokens.

    Runs the command once for each way its weights can come. Ends with 1 if anything differs.
    """
    import dataclasses
    import subprocess

    from sidecar import parity as comparing

    verdicts = comparing.parity(
        command, pool=pool, directory=Path(os.path.abspath(directory)), tokens=tokens, timeout=timeout,
        log=sys.stderr.fileno() if verbose else subprocess.DEVNULL,
        tell=(lambda _: None) if json else (lambda verdict: print(comparing.sentence(verdict), flush=True)),
    )  # fmt: skip
    if json:
        _print_json([dataclasses.asdict(verdict) for verdict in verdicts])
    return FAILED if any(verdict.differences for verdict in verdicts) else DONE


def _gid(text: str) -> int:
    import grp

    try:
        return int(text) if text.isdigit() else grp.getgrnam(text).gr_gid
    except KeyError:
        raise NameRefused(f"there is no group {text!r} on this machine: give its number with --group") from None


# What the commands share ----------------------------------------------------------------------------------------------


def _paths(pool: str, directory: Path) -> PoolPaths:
    return PoolPaths(pool, Path(os.path.abspath(directory)))


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


def _print_json(document: Any) -> None:
    import json

    json.dump(document, sys.stdout, indent=2)
    print()


def _log_to(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter("ballast: %(message)s"))
    log.handlers[:] = [handler]


def _configure_logging() -> None:
    logging.raiseExceptions = False  # a log that nobody reads any more is no reason to complain, least of all to stop
    log.propagate = False
    _log_to(logging.StreamHandler(sys.stderr))
    level = os.environ.get("BALLAST_LOG", "").strip().upper() or "INFO"
    log.setLevel(level if level in LEVELS else "INFO")
    if level not in LEVELS:
        log.warning("BALLAST_LOG=%s is none of %s; taken as INFO", level, ", ".join(LEVELS))


def main() -> NoReturn:
    """The entry point. Ends the process with the command's exit code."""
    _configure_logging()
    code = _run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `ballast manifest m | head`: the reader has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or FAILED
    sys.exit(code)


def _run() -> int:
    try:
        code: Any = app(prog_name="ballast", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        log.debug("the whole story", exc_info=True)
        return _explain(error)


def _explain(error: Exception) -> int:
    """One sentence about what went wrong, with the remedy; returns the exit code that goes with it."""
    if isinstance(error, (NotFound, NotReady)):
        return _say(error, NOT_READY)
    if isinstance(error, NameRefused):
        return _say(error, USAGE)
    if isinstance(error, HandoffError):
        return _say(error, FAILED)
    # A usage error's class is click's in older versions of typer and typer's own in newer ones; its methods are the same.
    describe = getattr(error, "format_message", None)
    if describe is not None:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "ballast"
        text = " ".join(describe().split()).rstrip(".")
        return _say(f"{text[:1].lower()}{text[1:]}: see '{path} --help'", USAGE)
    if isinstance(error, OSError) and error.strerror:
        return _say(f"{error.filename or 'the operating system'}: {error.strerror}: check that, and try again", FAILED)
    what = f"{type(error).__name__}: {error}"
    return _say(f"{what}: this is a fault of Ballast; run it with BALLAST_LOG=DEBUG and report what it prints", FAILED)


def _say(error: object, code: int) -> int:
    from sidecar.status import printable

    print(f"ballast: {printable(str(error))}", file=sys.stderr)
    return code
