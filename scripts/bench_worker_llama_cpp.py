"""llama.cpp's side of `scripts/bench_peers`, and the peer as `scripts/record_accuracy` uses it.

Runs in the peer's own environment (llama-cpp-python and numpy). Protocol: see `bench_protocol`.
"""

import ctypes
import time
from collections.abc import Sequence
from statistics import median

import llama_cpp as llama
import numpy as np
from bench_protocol import Answer, Request, serve, worker_args
from numpy.typing import NDArray

N_BATCH = 512
# f32 is f32 throughout only without flash attention; f16 is the peer's fastest with it.
KV_SETTINGS = {
    "f32": (llama.GGML_TYPE_F32, llama.LLAMA_FLASH_ATTN_TYPE_DISABLED),
    "f16": (llama.GGML_TYPE_F16, llama.LLAMA_FLASH_ATTN_TYPE_ENABLED),
}


_DISCARD_LOG = llama.llama_log_callback(lambda level, text, user_data: None)


class Peer:
    """A llama.cpp model with one context of at most `sequences` sequences."""

    def __init__(
        self, model_path: str, *, kv: str, context_tokens: int, sequences: int, threads: int
    ) -> None:
        llama.llama_log_set(_DISCARD_LOG, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self.model = llama.llama_model_load_from_file(
            model_path.encode(), llama.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"{model_path}: llama.cpp cannot load this model")
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        params = llama.llama_context_default_params()
        params.n_ctx = context_tokens
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_seq_max = sequences
        params.kv_unified = True  # so that branches share the cells of their common prefix
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_SETTINGS[kv][0]
        params.flash_attn_type = KV_SETTINGS[kv][1]
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp cannot make a context of {context_tokens} tokens")
        self.memory = llama.llama_get_memory(self.context)
        self._batch = llama.llama_batch_init(N_BATCH, 0, 1)

    def close(self) -> None:
        """Frees the model and its context."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self.context)
        llama.llama_model_free(self.model)

    def clear(self) -> None:
        """Forgets all sequences."""
        llama.llama_memory_clear(self.memory, True)

    def fork(self, branch: int) -> None:
        """Makes a sequence share all that sequence 0 holds."""
        llama.llama_memory_seq_cp(self.memory, 0, branch, -1, -1)

    def truncate(self, length: int) -> None:
        """Forgets what sequence 0 holds from position `length` on."""
        if not llama.llama_memory_seq_rm(self.memory, 0, length, -1):
            raise SystemExit("llama.cpp cannot truncate this model's sequences")

    def save(self, path: str, ids: Sequence[int]) -> None:
        """Writes sequence 0, which holds ids, to a file."""
        tokens = (llama.llama_token * len(ids))(*ids)
        if not llama.llama_state_seq_save_file(self.context, path.encode(), 0, tokens, len(ids)):
            raise SystemExit(f"{path}: llama.cpp cannot write this file")

    def restore(self, path: str, length: int) -> None:
        """Reads a file of `length` tokens into sequence 0."""
        tokens, count = (llama.llama_token * length)(), ctypes.c_size_t(0)
        bytes_read = llama.llama_state_seq_load_file(
            self.context, path.encode(), 0, tokens, length, ctypes.byref(count)
        )
        if not bytes_read or count.value != length:
            raise SystemExit(f"{path}: llama.cpp cannot read this file back")

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Computes rows of (token, position, sequence, wants logits), at most N_BATCH."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants_logits
        status = llama.llama_decode(self.context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with {status}")

    def _logits(self, row: int) -> NDArray[np.float32]:
        """A view of row's logits, valid until the next decode."""
        pointer = llama.llama_get_logits_ith(self.context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))

    def prefill(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Computes ids as sequence 0 from position 0; returns the logits after the last."""
        last = len(ids) - 1
        for start in range(0, len(ids), N_BATCH):
            chunk = ids[start : start + N_BATCH]
            self._decode([(t, start + i, 0, start + i == last) for i, t in enumerate(chunk)])
        return self._logits(len(chunk) - 1)

    def all_logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(ids), vocab] of one batch of at most N_BATCH ids."""
        self._decode([(token, position, 0, True) for position, token in enumerate(ids)])
        return np.stack([self._logits(row) for row in range(len(ids))])

    def step(self, tokens: Sequence[int], position: int) -> list[int]:
        """Feeds one token to each of sequences 0, 1, ...; returns each one's likeliest next."""
        self._decode([(token, position, seq, True) for seq, token in enumerate(tokens)])
        return [int(self._logits(row).argmax()) for row in range(len(tokens))]


def decode(peer: Peer, request: Request) -> Answer:
    """Prefills, forks, decodes greedily."""
    prompt, branches = request["prompt"], request["branches"]
    peer.clear()
    start = time.perf_counter()
    token = int(peer.prefill(prompt).argmax())
    prefill_s = time.perf_counter() - start
    for branch in range(1, branches):
        peer.fork(branch)
    tokens = [(token + branch) % peer.vocab_size for branch in range(branches)]
    start = time.perf_counter()
    for i in range(request["steps"]):
        tokens = peer.step(tokens, len(prompt) + i)
    return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - start}


def state(peer: Peer, request: Request) -> Answer:
    """Its file has no logits: the last token is computed again."""
    prompt, fork_times = request["prompt"], []
    peer.clear()
    peer.prefill(prompt)
    for branch in range(1, 1 + request["forks"]):
        start = time.perf_counter()
        peer.fork(branch)
        fork_times.append(time.perf_counter() - start)
    start = time.perf_counter()
    peer.save(request["path"], prompt)
    save_s = time.perf_counter() - start
    peer.clear()
    start = time.perf_counter()
    peer.restore(request["path"], len(prompt))
    restore_s = time.perf_counter() - start
    peer.truncate(len(prompt) - 1)
    peer.step(prompt[-1:], len(prompt) - 1)
    logits_s = time.perf_counter() - start
    return {
        "fork_s": median(fork_times),
        "save_s": save_s,
        "restore_s": restore_s,
        "logits_s": logits_s,
    }


def main() -> None:
    args = worker_args()
    start = time.perf_counter()
    peer = Peer(
        args.model,
        kv=args.kv,
        context_tokens=args.context_tokens,
        sequences=args.branches,
        threads=args.threads,
    )
    open_s = time.perf_counter() - start
    amx = "with" if b"AMX_INT8 = 1" in llama.llama_print_system_info() else "without"
    serve(
        f"llama.cpp (llama-cpp-python {llama.__version__}, {amx} AMX)",
        peer.vocab_size,
        open_s,
        decode=lambda request: decode(peer, request),
        state=lambda request: state(peer, request),
    )


if __name__ == "__main__":
    main()
