"""What the workers of `scripts/bench_peers` share: their flags and the lines they exchange.

A worker opens the model and says hello, then answers each request on a line with a line of figures.
It ends when stdin does and what it keeps for later starts is written.
Needs the standard library only, because each worker runs in its own environment.
"""

import argparse
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]  # prompt: token ids; what else depends on the request
Answer = dict[str, float]  # seconds by name


def worker_args() -> argparse.Namespace:
    """The flags that `bench_peers` passes to a worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv", required=True)
    parser.add_argument("--context-tokens", type=int, required=True)
    parser.add_argument("--branches", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return parser.parse_args()


def peak_bytes() -> int:
    """Most memory that this process has had resident, mapped files counted too."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def serve(
    program: str,
    vocab_size: int,
    open_s: float,
    *,
    decode: Callable[[Request], Answer],
    state: Callable[[Request], Answer],
) -> None:
    """Says hello, then answers the requests on stdin until it ends.

    program: its name and whatever else tells what was measured
    open_s: seconds from the call that opens the model to its return
    decode: of {"prompt", "branches", "steps"}, prefill_s and decode_s; the fork is in neither
    state:  of {"prompt", "forks", "path"}, for a context that holds the prompt: fork_s of one fork,
            save_s, restore_s, and logits_s from the file to the next token's logits
    """
    print(json.dumps({"program": program, "vocab_size": vocab_size, "open_s": open_s}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = decode(request) if "steps" in request else state(request)
        print(json.dumps(answer | {"peak_bytes": peak_bytes()}), flush=True)
