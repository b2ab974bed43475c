"""llamay's side of `scripts/bench_peers`. Protocol: see `bench_protocol`."""

import time

from bench_protocol import Case, Seconds, serve, worker_args

from llamay.engine import Branch, Engine
from llamay.mlx_kernels import Control
from llamay.model.decoder import Rows


def run_case(engine: Engine, case: Case) -> Seconds:
    """Prefills, forks, decodes greedily; the fork is in neither time."""
    engine.cache.clear_tree()
    start = time.perf_counter()
    branch = engine.prefill(case["prompt"])
    prefill_s = time.perf_counter() - start
    branches = [branch, *branch.fork(case["branches"] - 1)]
    decode_s = engine.call(lambda: decode(engine, branches, case["steps"]))
    for branch in branches:
        branch.close()
    return {"prefill_s": prefill_s, "decode_s": decode_s}


def decode(engine: Engine, branches: list[Branch], steps: int) -> float:
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


def main() -> None:
    args = worker_args()
    if args.kv != "f32":
        raise SystemExit(f"llamay has no {args.kv} cache yet; use --kv f32")
    engine = Engine.load(args.model, threads=args.threads, context_size=args.context_tokens)
    decoder = engine.model.decoder
    program = f"llamay ({decoder.kernels.name})"
    serve(program, decoder.vocab_size, lambda case: run_case(engine, case))


if __name__ == "__main__":
    main()
