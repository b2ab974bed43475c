"""Metadata of other programs' conversions, as llama.cpp's converter would have written it.

Ollama's of Gemma 3 call the bases of rope otherwise or leave them out, know no scaling of rope, and
may have the cap of logits that Gemma 2 has; those with images lack the norms' epsilon and name a
token for which the embedding has no row. Ollama mends this when it opens them
(`model/models/gemma3/model_text.go`), and keeps the chat template elsewhere.
"""

from typing import Any

import numpy as np

from llamay.gguf import GGUFFile

GEMMA3_MARKS = ("rope.global.freq_base", "rope.local.freq_base", "mm.tokens_per_image")
LONG_GEMMA3 = (34, 48, 62)  # layers of 4B, 12B and 27B, which stretch rope by 8
# As Google's model card of Gemma describes turns; there is no system role.
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\n'"
    " ~ message.content | trim ~ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
VOCABULARY = ("tokens", "scores", "token_type")


def with_usual_metadata(file: GGUFFile) -> GGUFFile:
    """The same file if it needs no change, else one with other metadata and the same tensors."""
    if file.metadata.get("general.architecture") != "gemma3":
        return file
    if not any(f"gemma3.{mark}" in file.metadata for mark in GEMMA3_MARKS):
        return file
    return GGUFFile(file.paths, _gemma3_of_ollama(file), file.tensors, (), file.source)


def _gemma3_of_ollama(file: GGUFFile) -> dict[str, Any]:
    given = file.metadata
    defaults = {
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.chat_template": GEMMA_TEMPLATE,
    }
    metadata = defaults | dict(given)
    if "gemma3.rope.freq_base" not in given:
        metadata["gemma3.rope.freq_base"] = given.get("gemma3.rope.global.freq_base", 1e6)
        metadata.pop("gemma3.final_logit_softcapping", None)
        if file.get("gemma3.block_count", int) in LONG_GEMMA3:
            metadata["gemma3.rope.scaling.type"] = "linear"
            metadata["gemma3.rope.scaling.factor"] = 8.0
    if "gemma3.rope.local.freq_base" in given:
        metadata["gemma3.rope.freq_base_swa"] = given["gemma3.rope.local.freq_base"]
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.rows if embedding else 0
    for name in VOCABULARY:
        values = given.get(f"tokenizer.ggml.{name}")
        if isinstance(values, list | np.ndarray) and len(values) == rows + 1:
            metadata[f"tokenizer.ggml.{name}"] = values[:rows]
    return metadata
