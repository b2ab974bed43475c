"""Compiles a spec and its weights into a program, and runs it on rows of contexts."""

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from llamay.errors import CancelledError, GGUFError, NumericsError, UnsupportedModelError
from llamay.formats import Format, KVLayout, KVPrecision
from llamay.gguf import GGUFFile
from llamay.kv import Cache, Context
from llamay.mlx_kernels import Control, Float32Array, KernelSet, Step, StepLogits
from llamay.mlx_kernels.program import (
    Attention,
    AttentionInput,
    AttentionOutput,
    Embed,
    FeedForward,
    Logits,
    Operation,
    PostNorm,
    Program,
)
from llamay.model.rope import FACTORS, LONGROPE, SHORT_FACTORS
from llamay.model.spec import DecoderSpec, read_spec
from llamay.model.weights import Weights


@dataclass(frozen=True, slots=True)
class Rows:
    """New tokens of one context in a step.

    tokens: appended to the context
    logits: how many of the last rows want logits
    best:   how many of the largest of each of these will be asked for, if a device can find them
    draft:  how many of the last tokens stay reserved only, for whoever judges them to commit
    """

    context: Context
    tokens: Sequence[int]
    logits: int = 1
    best: int = 0
    draft: int = 0

    @property
    def certain(self) -> Sequence[int]:
        """The tokens without the draft."""
        return self.tokens[: len(self.tokens) - self.draft]


def compile_program(spec: DecoderSpec, file: GGUFFile) -> Program:
    """The forward pass of the file's decoder.

    Raises GGUFError for a tensor that is missing or has another shape than the spec asks for.
    """
    weights = Weights(file)
    embedding = weights.embedding(spec.hidden)
    operations: list[Operation] = [Embed(embedding, spec.embedding_scale)]
    for layer in range(spec.num_layers):
        operations += _attention(spec, weights, layer)
        operations.append(_feed_forward(spec, weights, layer))
    norm = weights.vector("output_norm.weight", spec.hidden)
    head = weights.head(embedding)
    operations.append(Logits(norm, spec.norm_eps, head, spec.soft_caps[1]))
    return Program(
        hidden=spec.hidden,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=embedding.rows,
        attention_scale=spec.attention_scale,
        ropes=spec.ropes(_frequency_factors(spec, weights)),
        operations=tuple(operations),
        source=file.source,
    )


def _attention(spec: DecoderSpec, weights: Weights, layer: int) -> list[Operation]:
    prefix, traits = f"blk.{layer}", spec.traits
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if traits.fused:
        rows = (query_dim, kv_dim, kv_dim)
        query, key, value = weights.fused(f"{prefix}.attn_qkv.weight", rows, spec.hidden)
    else:
        query = weights.matrix(f"{prefix}.attn_q.weight", query_dim, spec.hidden)
        key = weights.matrix(f"{prefix}.attn_k.weight", kv_dim, spec.hidden)
        value = weights.matrix(f"{prefix}.attn_v.weight", kv_dim, spec.hidden)
    query_norm = key_norm = None
    if traits.head_norms:
        query_norm = weights.vector(f"{prefix}.attn_q_norm.weight", spec.head_dim)
        key_norm = weights.vector(f"{prefix}.attn_k_norm.weight", spec.head_dim)
    return [
        AttentionInput(
            layer=layer,
            norm=weights.vector(f"{prefix}.attn_norm.weight", spec.hidden),
            eps=spec.norm_eps,
            query=query,
            key=key,
            value=value,
            query_bias=weights.optional_vector(f"{prefix}.attn_q.bias", query_dim),
            key_bias=weights.optional_vector(f"{prefix}.attn_k.bias", kv_dim),
            value_bias=weights.optional_vector(f"{prefix}.attn_v.bias", kv_dim),
            query_norm=query_norm,
            key_norm=key_norm,
            rope=spec.rope_of(layer),
        ),
        Attention(layer, spec.windows[layer], spec.soft_caps[0]),
        AttentionOutput(
            weights.matrix(f"{prefix}.attn_output.weight", spec.hidden, query_dim),
            _post_norm(spec, weights, f"{prefix}.post_attention_norm.weight"),
        ),
    ]


def _feed_forward(spec: DecoderSpec, weights: Weights, layer: int) -> FeedForward:
    prefix, inner = f"blk.{layer}", spec.feed_forward
    if spec.traits.fused:
        gate, up = weights.fused(f"{prefix}.ffn_up.weight", (inner, inner), spec.hidden)
    else:
        gate = weights.matrix(f"{prefix}.ffn_gate.weight", inner, spec.hidden)
        up = weights.matrix(f"{prefix}.ffn_up.weight", inner, spec.hidden)
    return FeedForward(
        norm=weights.vector(f"{prefix}.ffn_norm.weight", spec.hidden),
        eps=spec.norm_eps,
        gate=gate,
        up=up,
        down=weights.matrix(f"{prefix}.ffn_down.weight", spec.hidden, inner),
        activation=spec.traits.activation,
        post_norm=_post_norm(spec, weights, f"{prefix}.post_ffw_norm.weight"),
    )


def _post_norm(spec: DecoderSpec, weights: Weights, name: str) -> PostNorm | None:
    if not spec.traits.post_norms:
        return None
    return PostNorm(weights.vector(name, spec.hidden), spec.norm_eps)


def _frequency_factors(spec: DecoderSpec, weights: Weights) -> list[float] | None:
    """The divisors of the rope frequencies, or None if the file has none.

    Raises UnsupportedModelError if they are not float32, GGUFError if one is below 1: angles would
    pass the largest position, up to which `sincos` is exact.
    """
    name = SHORT_FACTORS if spec.rope_scaling.kind == LONGROPE else FACTORS
    tensor = weights.optional_vector(name, spec.rope_dim // 2)
    if tensor is None:
        return None
    if tensor.format is not Format.F32:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r}: expected F32, found {tensor.format.name}; "
            "use another conversion of the model"
        )
    factors = [float(factor) for factor in np.frombuffer(tensor.data, dtype="<f4")]
    for factor in factors:
        if not 1 <= factor < math.inf:
            raise GGUFError(
                f"tensor {tensor.name!r}: expected divisors of the rope frequencies from 1, "
                f"found {factor}; use a complete conversion of the model"
            )
    return factors


def layout_digest(file: GGUFFile) -> str:
    """SHA-256, in hex, of the names and shapes of all tensors; formats and values play no part."""
    tensors = sorted((tensor.name, tensor.shape) for tensor in file.tensors.values())
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


class Decoder:
    """A model ready to run. One thread at a time; `Control.cancel` may come from any."""

    def __init__(self, file: GGUFFile, kernels: KernelSet) -> None:
        """Raises GGUFError or UnsupportedModelError for a file it cannot run."""
        self.spec = read_spec(file)
        self.kernels = kernels
        file.check_size()
        program = compile_program(self.spec, file)
        self.vocab_size = program.vocab_size
        self.num_operations = len(program.operations)
        self.layout_sha256 = layout_digest(file)
        self.weights_bytes = sum(len(tensor.data) for tensor in file.tensors.values())
        self._run = kernels.prepare(program)

    def layout(self, page_tokens: int, precision: KVPrecision = KVPrecision.F32) -> KVLayout:
        """Shape of this model's pages."""
        return KVLayout(
            self.spec.num_layers,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            page_tokens,
            precision,
        )

    def forward(self, cache: Cache, batch: Sequence[Rows], control: Control) -> Float32Array:
        """`step`, of whose results whole rows are read: [sum of rows.logits, vocab_size]."""
        return self.step(cache, batch, control).logits

    def step(self, cache: Cache, batch: Sequence[Rows], control: Control) -> StepLogits:
        """Runs one step and commits its tokens, those of a draft apart.

        Returns the logits of sum of rows.logits rows, in the order of the batch.
        Raises ValueError if a context is there twice or without tokens, ContextBusyError,
        BudgetError, CancelledError or NumericsError, with every context as it was.
        """
        contexts = [rows.context for rows in batch]
        if len({id(context) for context in contexts}) != len(contexts):
            raise ValueError("a context can be in a step once only")
        if not all(0 <= rows.logits <= len(rows.tokens) > 0 for rows in batch):
            raise ValueError("a context in a step has tokens, and logits of these only")
        with ExitStack() as owned:
            for context in contexts:
                owned.enter_context(context.in_use())
            try:
                for rows in batch:
                    rows.context.reserve(len(rows.tokens))
                found = self._run(_assemble(batch), cache.store.slabs, control)
                if found is None:
                    raise CancelledError("the step was cancelled")
                if not _finite(found):
                    raise NumericsError("the model gave logits that are not finite; it is damaged")
            except BaseException:
                for context in contexts:
                    context.truncate(context.length)
                raise
            for rows in batch:
                rows.context.commit(rows.certain)
        return found

    def last_logits(self, cache: Cache, context: Context) -> Float32Array:
        """[vocab_size] float32 of the context's last position, computed from what it holds.

        Writes nothing. Raises ValueError for an empty context.
        """
        if context.length == 0:
            raise ValueError("an empty context has no last position")
        with context.in_use():
            step = Step(
                tokens=np.array([context.tokens[-1]], dtype=np.int32),
                positions=np.array([context.length - 1], dtype=np.int32),
                contexts=np.zeros(1, dtype=np.int32),
                writes=np.zeros(1, dtype=np.bool_),
                page_table=np.array([context.page_ids], dtype=np.int32),
                logit_rows=np.zeros(1, dtype=np.int32),
            )
            found = self._run(step, cache.store.slabs, Control())
        assert found is not None, "nobody can cancel it"
        last: Float32Array = found.logits[0]
        return last


def _finite(found: StepLogits) -> bool:
    """Whether all logits are; rows are not read if the device has looked at them."""
    if found.best:
        return not any(math.isnan(best.log_sum_exp) for best in found.best)
    logits = found.logits  # NaN is the largest and the smallest of all
    return not logits.size or (math.isfinite(logits.max()) and math.isfinite(logits.min()))


def _assemble(batch: Sequence[Rows]) -> Step:
    """The step's arrays. Lists first: few calls of numpy, as a decode has few rows."""
    tokens: list[int] = []
    positions: list[int] = []
    contexts: list[int] = []
    logit_rows: list[int] = []
    for index, rows in enumerate(batch):
        start, count = rows.context.length, len(rows.tokens)
        tokens += rows.tokens
        positions += range(start, start + count)
        contexts += [index] * count
        logit_rows += range(len(tokens) - rows.logits, len(tokens))
    max_pages = max(len(rows.context.page_ids) for rows in batch)
    table = np.full((len(batch), max_pages), -1, dtype=np.int32)
    for index, rows in enumerate(batch):
        table[index, : len(rows.context.page_ids)] = rows.context.page_ids
    return Step(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        contexts=np.array(contexts, dtype=np.int32),
        writes=np.ones(len(tokens), dtype=np.bool_),
        page_table=table,
        logit_rows=np.array(logit_rows, dtype=np.int32),
        best=max(rows.best for rows in batch),
    )
