"""llamay's side of `scripts/bench_peers`. Protocol: see `bench_protocol`."""

import time

from bench_protocol import Case, Seconds, serve, worker_args

from llamay.engine import Branch, Engine
from llamay.mlx_kernels import Control
from llamay.model.decoder import Rows


def run_case(engine: Engine, case: Case) -> Seconds:
    """Prefills, forks, decodes greedily; the fork is in neither time."""
    prompt, steps = case["prompt"], case["steps"]
    start = time.perf_counter()
    branch = engine.read(engine.cache.new_context(), prompt)
    token = int(branch.logits.argmax())
    prefill_s = time.perf_counter() - start
    branches: list[Branch] = [branch, *(engine.fork(branch) for _ in range(case["branches"] - 1))]
    tokens = [(token + i) % engine.decoder.vocab_size for i in range(len(branches))]
    start = time.perf_counter()
    for _ in range(steps):
        rows = [Rows(b.context, [t]) for b, t in zip(branches, tokens, strict=True)]
        logits = engine.decoder.forward(engine.cache, rows, Control())
        tokens = [int(row.argmax()) for row in logits]
    decode_s = time.perf_counter() - start
    for branch in branches:
        branch.context.close()
    return {"prefill_s": prefill_s, "decode_s": decode_s}


def main() -> None:
    args = worker_args()
    if args.kv != "f32":
        raise SystemExit(f"llamay has no {args.kv} cache yet; use --kv f32")
    engine = Engine.load(args.model, threads=args.threads, context_size=args.context_tokens)
    program = f"llamay ({engine.decoder.kernels.name})"
    serve(program, engine.decoder.vocab_size, lambda case: run_case(engine, case))


if __name__ == "__main__":
    main()
