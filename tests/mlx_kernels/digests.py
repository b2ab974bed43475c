"""SHA-256 of what the CPU kernels compute, to compare machines, compilers and instruction sets.

    python -m tests.mlx_kernels.digests >FILE            for every kernel set of this processor
    python -m tests.mlx_kernels.digests compare FILE...  fails unless all of them agree

Inputs come from integers alone, so they are the same everywhere. A line is kernel set, item and
digest.
"""

import hashlib
import itertools
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamay.formats import Format, KVPrecision
from llamay.mlx_kernels import _cpu
from tests.block_codes import SUPERBLOCKS
from tests.mlx_kernels.small_model import FORMATS, MIXED, SmallModel, tokens
from tests.quantisers import quantise
from tests.tiny_models import CONFIGS, TinyConfig, random_integers

F32 = NDArray[np.float32]

DECODE = 4
ROWS, COLUMNS = 37, 96  # neither a multiple of the 16 lanes nor a single block
WIDE_COLUMNS = 512
ACTIVATION_ROWS = (1, 2, 3, 7, 13)  # tiles of every width, whole and padded
NEW_FORMATS = tuple(format for format in Format if format not in FORMATS)
WIDE = {"hidden": 256, "ffn": 256, "head_dim": 64, "layers": 1}  # for superblocks of 256
# (model, format or formats, tokens of prefill, KV precision); the long ones' attention merges two
# runs of 256 positions.
MODELS = {
    **{
        f"llama {format.name}": (TinyConfig(rope="llama3"), format, 40, KVPrecision.F32)
        for format in FORMATS
    },
    **{
        f"qwen2 {format.name}": (TinyConfig(arch="qwen2"), format, 40, KVPrecision.F32)
        for format in FORMATS
    },
    **{
        f"llama {format.name}": (
            TinyConfig(**WIDE) if format in SUPERBLOCKS else TinyConfig(),
            format,
            40,
            KVPrecision.F32,
        )
        for format in NEW_FORMATS
    },
    **{
        f"{arch} long": (CONFIGS[arch], Format.Q4_1, 280, KVPrecision.F32)
        for arch in ("qwen3", "gemma2", "gemma3", "phi3")
    },
    "qwen2 mixed": (TinyConfig(**WIDE | {"arch": "qwen2"}), MIXED, 40, KVPrecision.F32),
    "llama yarn long": (TinyConfig(rope="yarn", layers=1), Format.Q4_1, 270, KVPrecision.F32),
    **{
        f"llama kv {precision.value}": (TinyConfig(), Format.Q4_1, 270, precision)
        for precision in KVPrecision
    },
}
LOGITS = {"wide": 2.0**-8, "narrow": 2.0**-14, "ties": 0.25}
FILTERS = ((0, 1.0, 0.0), (40, 0.95, 0.05), (3, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.2))


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def model_logits(
    kernel_set: str,
    config: TinyConfig,
    format: Format | Sequence[Format],
    prefill: int,
    precision: KVPrecision,
) -> Iterator[bytes]:
    """Of every row of a prefill in chunks and a few decode steps."""
    ids = tokens(prefill + DECODE, seed=1)
    model = SmallModel(config, format, kernel_set, positions=len(ids), precision=precision)
    chunks = [ids[at : min(at + 29, prefill)] for at in range(0, prefill, 29)]
    for chunk in [*chunks, *([token] for token in ids[prefill:])]:
        logits = model.step([chunk])
        assert logits is not None
        yield logits.tobytes()


def columns_of(format: Format) -> int:
    return WIDE_COLUMNS if format in SUPERBLOCKS else COLUMNS


def crafted_weights(format: Format) -> bytes:
    """Random blocks, some with the extreme codes that saturating products get wrong."""
    columns = columns_of(format)
    weights = (random_integers(2, "weights", ROWS * columns) * 2.0**-15).astype(np.float32)
    data = quantise(weights.reshape(ROWS, columns), format)
    if format not in (Format.Q8_0, *SUPERBLOCKS):
        return data
    blocks = np.frombuffer(data, np.uint8).reshape(-1, format.block_bytes).copy()
    if format in SUPERBLOCKS:
        blocks[0::5, 20:80] = 0x80  # codes in all of these formats
        blocks[1::5, 20:80] = 0xFF
        return blocks.tobytes()
    blocks[0::5, 2:] = 0x80  # -128
    blocks[1::5, 2:] = np.where(np.arange(32) % 2, 0x80, 0x7F)
    blocks[2::5, 1] |= 0x80  # a negative scale
    blocks[3::5, 1] = 0  # a subnormal one
    return blocks.tobytes()


def crafted_activations(rows: int, columns: int) -> F32:
    """Rows of random values, among them all +-maximum, zeros, halves, tiny and huge ones."""
    x = (random_integers(3, "activations", rows * columns) * 2.0**-12).astype(np.float32)
    x = x.reshape(rows, columns)
    x[0::4, :32] = np.where(np.arange(32) % 2, -8, 8)
    x[1::4, 32:64] = 0
    x[1::4, 64:96] = np.arange(32) - 15.5
    x[2::4] *= np.float32(2.0**-120)
    x[3::4, :64] *= np.float32(2.0**100)
    return x


def matmul(kernel_set: str, format: Format, planes: int) -> Iterator[bytes]:
    source, shape = crafted_weights(format), (format.type_id, ROWS, columns_of(format))
    packed = bytearray(_cpu.packed_bytes(*shape))
    _cpu.pack(*shape, source, packed)
    for rows in ACTIVATION_ROWS:
        out = np.empty((rows, ROWS), np.float32)
        x = crafted_activations(rows, columns_of(format))
        _cpu.matmul(kernel_set, *shape, packed, planes, x, out)
        yield out.tobytes()


def logits(kind: str) -> F32:
    """As many as the tiny models' vocabulary; of "ties" there are only 16 different ones."""
    integers = random_integers(4, kind, 271)
    return ((integers // 4096 if kind == "ties" else integers) * LOGITS[kind]).astype(np.float32)


def samples(kernel_set: str, kind: str) -> Iterator[bytes]:
    for (top_k, top_p, min_p), temperature in itertools.product(FILTERS, (0.3, 1.0, 1.7)):
        for uniform in (0.0, 0.25, 0.618, 0.999):
            options = (temperature, top_k, top_p, min_p, uniform)
            yield struct.pack("<i", _cpu.sample(kernel_set, logits(kind), *options))


def digests(kernel_set: str) -> dict[str, str]:
    """Item -> digest."""
    items = {
        f"logits {name}": _digest(*model_logits(kernel_set, *model))
        for name, model in MODELS.items()
    }
    for format, planes in itertools.product((*FORMATS, *NEW_FORMATS), (1, 2)):
        items[f"matmul {format.name} {planes}"] = _digest(*matmul(kernel_set, format, planes))
    for kind in LOGITS:
        total = _cpu.log_sum_exp(kernel_set, logits(kind))
        items[f"log_sum_exp {kind}"] = _digest(struct.pack("<d", total))
        items[f"sample {kind}"] = _digest(*samples(kernel_set, kind))
    for dim, base in ((32, 1e4), (128, 5e5)):
        frequencies = _cpu.rope_frequencies(dim, base)
        items[f"rope_frequencies {dim}"] = _digest(np.array(frequencies, "<f8").tobytes())
    logarithms = [_cpu.log(n * 2.0**e) for n in (1, 3, 1.5, 1.4142135) for e in range(-60, 61, 7)]
    items["log"] = _digest(np.array(logarithms, "<f8").tobytes())
    return items


def disagreements(files: list[Path]) -> list[str]:
    """A sentence for each item whose digests differ, or that some kernel set lacks."""
    found: dict[str, dict[str, list[str]]] = {}
    sets = set()
    for file in files:
        for line in file.read_text().splitlines():
            kernel_set, _, rest = line.partition(" ")
            item, _, digest = rest.rpartition(" ")
            label = f"{kernel_set} ({file.stem})"
            sets.add(label)
            found.setdefault(item, {}).setdefault(digest, []).append(label)
    problems = [] if found else ["there is no digest to compare"]
    for item, by_digest in found.items():
        missing = sets - set(itertools.chain.from_iterable(by_digest.values()))
        if missing:
            problems.append(f"{item}: missing from {', '.join(sorted(missing))}")
        if len(by_digest) > 1:
            sides = [f"{', '.join(names)}: {digest[:8]}" for digest, names in by_digest.items()]
            problems.append(f"{item}: different bits; {'; '.join(sides)}")
    return problems


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        files = [Path(name) for name in sys.argv[2:]]
        if problems := disagreements(files):
            sys.exit("\n".join(problems))
        count = sum(len(file.read_text().splitlines()) for file in files)
        print(f"{count} digests of {len(files)} builds agree")
        return
    for kernel_set in _cpu.kernel_sets():
        for item, digest in digests(kernel_set).items():
            print(kernel_set, item, digest)


if __name__ == "__main__":
    main()
