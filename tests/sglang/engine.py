"""A process that has SGLang imported, and forks a child for each job that it is told of: an engine of its own, in seconds.

    python engine.py FOLDER     # reads lines of JSON, each a job: {"id": ..., "model": ..., "args": {...}, "env": {...}, ...}

A child is a scheduler's process without its queue: SGLang's own ModelRunner, unmodified, loads the model and runs it. Nothing
here knows of Ballast, except `keys`, which asks the adapter, and `foreign`. A job's folder, FOLDER/<id>, gets its `log`, its
`pid` (a line for each rank), its `result` as JSON, and at its end its exit `code`.

A job may ask for more than tokens: `only: "load"` (no forward pass), `draft` (a second model beside the first), `update` and
`tensors` (weights are replaced, then the prompts again), `ranks` (so many processes), `sabotage` (a function, as module:name,
that raises when its work is done; with `sabotage_with` it kills its process, "kill", or is interrupted by Ctrl-C, "interrupt"),
`hidden_view`, `fails` (the start must end in an error, whose text is the result), `twisted` (post-processing leaves one tensor
more), `then: "hang"` (answer and wait to be killed), `kernels` (stand-ins for what quantised weights need: kernels.py),
`foreign` (so many bytes of the model are on a device and not of this process's own), `gpu` (over the emulated driver:
device_side.py), `keys`, `accounting` (the modules of these names) and `fingerprint`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROMPTS = ["the sea was calm and the", "a cargo of", "one two three four", "Ballast keeps"]
_TOP = 20  # log probabilities that are told for each token
_PR_SET_PDEATHSIG = 1


def arguments(job: dict[str, Any]) -> Any:
    from sglang.srt.server_args import ServerArgs

    made = ServerArgs(
        **{
            "model_path": job["model"], "device": "cpu", "attention_backend": "torch_native", "dtype": "bfloat16",
            "disable_cuda_graph": True, "max_total_tokens": 1024, "max_running_requests": 8, "random_seed": 1,
            "log_level": "info", **job.get("args", {}),
        }
    )  # fmt: skip
    made.resolve_once()
    return made


def publish(args: Any, rank: int) -> None:
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    one_batch._init_process_global_configs()


def started(job: dict[str, Any], args: Any, rank: int, port: int) -> Any:
    """SGLang's ModelRunner with the model loaded, and its memory pools unless only that is asked for."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import get_device

    if job.get("hidden_view"):
        hide_a_view()
    if job.get("twisted"):
        twist()
    config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=port)
    bootstrap.init_layer_runtime(model_config=config)
    common = {"mem_fraction_static": 0.5, "gpu_id": 0, "nccl_port": port, "server_args": args}
    runner = ModelRunner(model_config=config, **common)
    if "draft" in job:  # as speculative decoding loads it, in the same process; kept as long as its target
        of_draft = ModelConfig.from_server_args(args, model_path=job["draft"], is_draft_model=True)
        runner.draft_runner = ModelRunner(model_config=of_draft, is_draft_worker=True, **common)
    if job.get("only") != "load":
        runner.alloc_memory_pool()
        runner.init_attention_backends()
        runner.init_cuda_graphs()
    return runner


def hide_a_view() -> None:
    """Has each normalisation layer keep a view of its weight where no walk through the modules finds it."""
    from sglang.srt.layers.layernorm import RMSNorm

    original = RMSNorm.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.views = [self.weight.data.view(-1)]

    RMSNorm.__init__ = init


def twist() -> None:
    """Has post-processing leave a tensor in each layer, as another version or device may do."""
    import torch
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    original = UnquantizedLinearMethod.process_weights_after_loading

    def process(self: Any, layer: Any) -> None:
        original(self, layer)
        layer.twisted = torch.zeros(3)

    UnquantizedLinearMethod.process_weights_after_loading = process


def answers(job: dict[str, Any], runner: Any) -> list[Any]:
    """For each prompt greedy tokens, each with the largest log probabilities."""
    import torch
    from sglang.benchmark import one_batch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    bench = one_batch._TorchBenchRunner(runner)
    tokenizer = get_tokenizer(job["model"])
    found = []
    for prompt in job.get("prompts", PROMPTS):
        bench.clear()
        ids = array("q", tokenizer.encode(prompt))
        request = Req(rid=0, origin_input_text=prompt, origin_input_ids=ids, sampling_params=SamplingParams(temperature=0))
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = len(ids)
        token, logits, batch = bench.extend([request])
        rows = []
        for _ in range(job.get("tokens", 16)):
            top = torch.log_softmax(logits[0].float(), -1).topk(_TOP)
            rows.append([int(token[0]), top.indices.tolist(), top.values.tolist()])
            token, logits = bench.decode(token, batch)
        found.append(rows)
    return found


def run(job: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    if "keys" in job:
        from keys import compute

        return compute(job)
    if "accounting" in job:
        from accounting import budgets

        return budgets(job)
    if "fingerprint" in job:
        from sglang.srt.weight_cache.protocol import CacheConfig

        return {"fields": list(CacheConfig.__struct_fields__)}
    if job.get("kernels"):
        from kernels import provide

        provide()
    if "gpu" in job:
        from device_side import play

        return play(job, rank, port)
    if "foreign" in job:
        from engine_shim.hooks import sglang as hook

        hook.foreign_bytes = lambda *_: job["foreign"]
    args = arguments(job)
    publish(args, rank)
    began = time.monotonic()
    runner = started(job, args, rank, port)
    result: dict[str, Any] = {"seconds": time.monotonic() - began, "preloaded": runner.preloaded_weights_bytes}
    load_only = job.get("only") == "load"
    if not load_only:
        result["answers"] = answers(job, runner)
    if "update" in job:
        result["update"] = list(runner.weight_updater.update_weights_from_disk(job["update"], "auto"))
        result["updated"] = None if load_only else answers(job, runner)
    if "tensors" in job:
        import torch

        parameters = dict(runner.model.named_parameters())
        given = [(name, torch.full_like(parameters[name].data, value)) for name, value in job["tensors"].items()]
        result["update"] = list(runner.weight_updater.update_weights_from_tensor(given, "direct"))
        result["updated"] = answers(job, runner)
    return result


@contextlib.contextmanager
def sabotaged(place: str | None, how: str | None) -> Iterator[None]:
    """Has a function do its work and then raise, as a fault in it would, or `how`: kill the process, or be interrupted."""
    if place is None:
        yield
        return
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if how == "interrupt" else RuntimeError("sabotage")

    setattr(owner, name, broken)
    yield


def child(job: dict[str, Any], folder: Path, rank: int, port: int) -> int:
    """In the child: the whole job. The exit code."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    os.environ.update(job.get("env", {}))
    try:
        with sabotaged(job.get("sabotage"), job.get("sabotage_with")):
            result = run(job, rank, port)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        if not job.get("fails"):
            return 1
        result = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    if rank == 0:
        (folder / "result.new").write_text(json.dumps(result))
        (folder / "result.new").rename(folder / "result")
    if job.get("then") == "hang":
        time.sleep(900)
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: what is done in the background is waited for
    return 0


def spawn(job: dict[str, Any], folder: Path, rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        code = child(job, folder, rank, port)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    home = Path(sys.argv[1])
    began = time.monotonic()
    import sglang.benchmark.one_batch  # everything that an engine imports
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    import torch

    torch.set_num_threads(1)
    (home / "ready").write_text(f"{time.monotonic() - began:.1f}")
    running: dict[int, Path] = {}
    codes: dict[Path, int] = {}
    told = b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            data = os.read(0, 1 << 16)  # not through a buffer, in which a second line would wait unseen
            if not data:
                return
            told += data
        while b"\n" in told:
            line, _, told = told.partition(b"\n")
            job = json.loads(line)
            folder = home / job["id"]
            folder.mkdir()
            port = free_port()
            for rank in range(job.get("ranks", 1)):
                running[spawn(job, folder, rank, port)] = folder
            pids = [str(pid) for pid, where in running.items() if where == folder]
            (folder / "pid.new").write_text("\n".join(pids))
            (folder / "pid.new").rename(folder / "pid")
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            folder = running.pop(pid)
            codes[folder] = codes.get(folder, 0) or os.waitstatus_to_exitcode(status)
            if folder not in running.values():
                (folder / "code.new").write_text(str(codes.pop(folder)))
                (folder / "code.new").rename(folder / "code")


if __name__ == "__main__":
    main()
