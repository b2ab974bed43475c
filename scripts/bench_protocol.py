"""What the workers of `scripts/bench_peers` share: their flags and the lines they exchange.

Needs the standard library only, because each worker runs in its own environment.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

Case = dict[str, Any]  # prompt: token ids; branches, steps: numbers
Seconds = dict[str, float]  # prefill_s, decode_s


def worker_args() -> argparse.Namespace:
    """The flags that `bench_peers` passes to a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv", required=True)
    parser.add_argument("--context-tokens", type=int, required=True)
    parser.add_argument("--branches", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def serve(program: str, vocab_size: int, run: Callable[[Case], Seconds]) -> None:
    """Names the program, then answers each case on stdin with its times, until stdin ends."""
    print(json.dumps({"program": program, "vocab_size": vocab_size}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
