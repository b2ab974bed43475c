"""llamay's side of `scripts/bench_peers`. Protocol: see `bench_protocol`."""

import time
from statistics import median

from bench_protocol import Answer, Request, serve, worker_args

from llamay.engine import Branch, Engine
from llamay.formats import KVPrecision
from llamay.mlx_kernels import Control
from llamay.mlx_kernels.cpu import CpuKernels
from llamay.model.decoder import Rows


def decode(engine: Engine, request: Request) -> Answer:
    """Prefills, forks, decodes greedily."""
    engine.cache.clear_tree()
    start = time.perf_counter()
    branch = engine.prefill(request["prompt"])
    prefill_s = time.perf_counter() - start
    branches = [branch, *branch.fork(request["branches"] - 1)]
    decode_s = engine.call(lambda: greedy_steps(engine, branches, request["steps"]))
    for branch in branches:
        branch.close()
    return {"prefill_s": prefill_s, "decode_s": decode_s}


def greedy_steps(engine: Engine, branches: list[Branch], steps: int) -> float:
    """Seconds of greedy steps, whatever would end an answer; first tokens differ by branch."""
    decoder = engine.model.decoder
    logits = branches[0].context.logits
    assert logits is not None
    tokens = [(int(logits.argmax()) + i) % decoder.vocab_size for i in range(len(branches))]
    start = time.perf_counter()
    for _ in range(steps):
        rows = [Rows(b.context, [t]) for b, t in zip(branches, tokens, strict=True)]
        tokens = [int(row.argmax()) for row in decoder.forward(engine.cache, rows, Control())]
    return time.perf_counter() - start


def state(engine: Engine, request: Request) -> Answer:
    """Saves without waiting for the disk, as llama.cpp does; digests are made and checked."""
    engine.model.identity()  # hashes the model's file, the first time
    engine.cache.clear_tree()
    branch = engine.prefill(request["prompt"])
    forks, fork_times = [], []
    for _ in range(request["forks"]):
        start = time.perf_counter()
        forks += branch.fork()
        fork_times.append(time.perf_counter() - start)
    start = time.perf_counter()
    info = branch.save(request["path"], kv=branch.context.layout.precision)
    save_s = time.perf_counter() - start - info.fsync_seconds
    for made in (branch, *forks):
        made.close()
    engine.cache.clear_tree()
    start = time.perf_counter()
    restored = engine.restore(request["path"])
    restore_s = time.perf_counter() - start
    if restored.context.logits is None:
        engine.call(lambda: engine.model.decoder.last_logits(engine.cache, restored.context))
    logits_s = time.perf_counter() - start
    restored.close()
    return {
        "fork_s": median(fork_times),
        "save_s": save_s,
        "restore_s": restore_s,
        "logits_s": logits_s,
    }


def main() -> None:
    args = worker_args()
    start = time.perf_counter()
    engine = Engine.load(
        args.model,
        threads=args.threads,
        precision=KVPrecision(args.kv),
        context_size=args.context_tokens,
    )
    open_s = time.perf_counter() - start
    decoder = engine.model.decoder
    kernels = decoder.kernels
    weights = ""
    if isinstance(kernels, CpuKernels):
        weights = ", mapped weights" if kernels.weights_mapped else ", weights packed at the start"
    serve(
        f"llamay ({kernels.name}{weights})",
        decoder.vocab_size,
        open_s,
        decode=lambda request: decode(engine, request),
        state=lambda request: state(engine, request),
    )
    if isinstance(kernels, CpuKernels) and kernels.weights_writer is not None:
        kernels.weights_writer.join()  # so that the next worker finds what this one has packed


if __name__ == "__main__":
    main()
