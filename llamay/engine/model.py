"""A model ready to run: its decoder, its tokenizer, and what they were read from."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llamay.errors import HubError, UsageError
from llamay.formats import KVPrecision
from llamay.gguf import open_gguf, source_now
from llamay.hub import DEFAULT_MODEL, Progress, resolve, weights_digest
from llamay.hub.paths import cache_dir
from llamay.hub.progress import silent
from llamay.kv import Cache
from llamay.kv.snapshot import Identity
from llamay.mlx_kernels import KernelSet, load_kernels, numerics_id
from llamay.mlx_kernels.machine import usable_memory
from llamay.model.conversions import with_usual_metadata
from llamay.model.decoder import Decoder
from llamay.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llamay.tokenizer.chat import ChatTemplate

MAX_PAGE_TOKENS = 1024


@dataclass(eq=False, slots=True)
class Model:
    """What an engine runs.

    source:   path of the model's file
    template: the file's chat template, or None
    parts:    all files of a split model, or the one; opened: what they were then, see `GGUFFile`
    """

    decoder: Decoder
    tokenizer: Tokenizer
    source: str
    template: str | None
    parts: tuple[Path, ...]
    opened: str
    _identity: Identity | None = field(default=None, init=False, repr=False)

    @classmethod
    def load(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        device: str = "auto",
        threads: int | None = None,
        progress: Progress = silent,
    ) -> "Model":
        """Opens a model by path or name; the default one is pulled if it is not here.

        Raises HubError if it cannot be found, GGUFError or UnsupportedModelError if it cannot be
        run, UsageError for an option out of range.
        """
        path = resolve(model, progress)
        caches = cache_dir()
        kernels = load_kernels(device, threads, caches / "kernels.json", caches / "packed")
        with open_gguf(path) as file, ThreadPoolExecutor(1) as executor:
            # The tokenizer's library and the packing of weights both run without the interpreter.
            metadata = with_usual_metadata(file).metadata
            reading = executor.submit(Tokenizer.from_metadata, metadata, str(path))
            decoder = Decoder(file, kernels)
            tokenizer = reading.result()
            template = metadata.get("tokenizer.chat_template")
        if tokenizer.vocab_size > decoder.vocab_size:
            raise UsageError(
                f"{path}: the tokenizer has {tokenizer.vocab_size} tokens, the model only "
                f"{decoder.vocab_size}; use another conversion of the model"
            )
        return cls(decoder, tokenizer, str(path), template, file.paths, file.source)

    @property
    def name(self) -> str:
        """The model's name by its file."""
        return self.decoder.spec.name

    @property
    def moves_rows_anywhere(self) -> bool:
        """Whether any thread may move rows between pages and files; else only the engine's may."""
        return self.decoder.kernels.row_threads > 1

    def identity(self, progress: Progress = silent) -> Identity:
        """What this model's contexts belong to. The first call may hash the whole file.

        Raises HubError if the file is no longer the one that was opened.
        """
        if self._identity is None:
            self._check_source()
            digest = weights_digest(Path(self.source), progress)
            self._check_source()  # so that these weights were hashed and no others
            decoder = self.decoder
            self._identity = Identity(
                decoder.spec.architecture, decoder.vocab_size, decoder.layout_sha256, digest
            )
        return self._identity

    def decoder_on(self, kernels: KernelSet) -> Decoder:
        """The same model on other kernels.

        Raises GGUFError if its file has become unreadable, HubError if it is another one now.
        """
        with open_gguf(self.source) as file:
            self._check(file.source)
            return Decoder(file, kernels)

    def _check_source(self) -> None:
        try:
            now = source_now(self.parts)
        except OSError as error:
            raise HubError(
                f"{self.source}: the model's file was readable when it was opened, and is not now "
                f"({error.strerror}); put it back and open it again"
            ) from error
        self._check(now)

    def _check(self, source: str) -> None:
        if source != self.opened:
            raise HubError(
                f"{self.source}: the model's file was replaced or changed since it was opened; "
                "open it again"
            )

    def chat_template(self) -> "ChatTemplate":
        """The file's chat template. Raises TemplateError if it has none or a broken one."""
        from llamay.tokenizer.chat import ChatTemplate

        metadata = {"tokenizer.chat_template": self.template}
        return ChatTemplate.from_metadata(metadata, self.tokenizer, self.source)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a plain text, with bos if the model wants one; never empty.

        Raises UsageError if nothing would be left to read.
        """
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id
        if bos is not None and (self.tokenizer.add_bos or not ids):
            ids.insert(0, bos)
        if not ids:
            raise UsageError("prompt: expected some text, found none")
        return ids

    def new_cache(
        self,
        page_tokens: int = 64,
        precision: KVPrecision = KVPrecision.F32,
        budget_bytes: int | None = None,
    ) -> Cache:
        """An empty cache for this model's contexts.

        budget_bytes: most memory for keys and values; None takes half of what this process may use
        Raises UsageError for a page size that the kernels do not take.
        """
        if page_tokens not in range(16, MAX_PAGE_TOKENS + 1, 16):
            raise UsageError(
                f"page-tokens: expected a multiple of 16 up to {MAX_PAGE_TOKENS}, "
                f"found {page_tokens}"
            )
        layout = self.decoder.layout(page_tokens, precision)
        return Cache(
            self.decoder.kernels,
            layout,
            numerics=numerics_id(self.decoder.kernels, layout),
            budget_bytes=usable_memory() // 2 if budget_bytes is None else budget_bytes,
        )
