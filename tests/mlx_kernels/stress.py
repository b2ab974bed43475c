"""Runs many small programs at once, for a build with a sanitizer.

    python -m tests.mlx_kernels.stress

Pools of 1 to 4 threads come and go, each runs its steps in a thread of its own, and the last step
is cancelled. Fails if two runs of one format differ.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llamay.formats import Format
from llamay.mlx_kernels import Control, _cpu
from tests.mlx_kernels.small_model import FORMATS, MIXED, SmallModel, tokens
from tests.tiny_models import TinyConfig

ROUNDS, DECODES = 3, 12
BATCH = 7  # enough rows for every job of a step to be shared among threads


def run_steps(threads: int, format: Format | tuple[Format, ...], kernel_set: str) -> bytes:
    """Logits of a prefill, and of decode steps of one row and of a batch, on a new pool."""
    wide = {} if isinstance(format, Format) else {"hidden": 256, "ffn": 256, "head_dim": 64}
    config = TinyConfig(layers=1, **wide)
    model = SmallModel(config, format, kernel_set, threads=threads, contexts=BATCH)
    batch = [tokens(10 + index, seed=index) for index in range(BATCH)]
    steps = [batch, *([[token]] for token in tokens(DECODES, seed=20))]
    steps += [[[token]] * BATCH for token in tokens(DECODES, seed=21)]
    logits = [model.step(rows) for rows in steps]
    cancelled = Control()
    cancelled.cancel()
    assert model.step(batch, cancelled) is None, "a cancelled step has run"
    return np.concatenate(logits).tobytes()


def main() -> None:
    jobs = [
        (threads, format, kernel_set)
        for format in (*FORMATS, MIXED)
        for kernel_set in _cpu.kernel_sets()
        for threads in (1, 2, 3, 4)
    ]
    jobs *= ROUNDS
    wanted: dict[Format | tuple[Format, ...], bytes] = {}
    with ThreadPoolExecutor(3) as executor:
        results = executor.map(lambda job: run_steps(*job), jobs)
        for job, logits in zip(jobs, results, strict=True):
            assert wanted.setdefault(job[1], logits) == logits, f"{job} gave other bits"
    print(f"{len(jobs)} programs ran on pools of 1 to 4 threads")


if __name__ == "__main__":
    main()
