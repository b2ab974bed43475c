"""What opens models and sessions for the screens, which hold sessions and never engines."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from llamay.errors import LlamayError, SessionBusyError
from llamay.tui.text import size

if TYPE_CHECKING:
    from llamay.engine import Engine
    from llamay.hub import Progress
    from llamay.kv.snapshot import Key
    from llamay.session import Session
    from llamay.session.catalog import Catalog

Told: TypeAlias = Callable[[str], None]
Load: TypeAlias = "Callable[[str, Progress], Engine]"
_MODELS_FILE = "models-used.json"


class Host(Protocol):
    """Opens one model and one session at a time. `open` waits; all else is quick.

    home:   llamay's folder, with `keys.toml`
    key:    of encrypted sessions
    model:  the name of the model in use, as its user gave it
    remark: a sentence about the last opening that the user should read, or empty
    """

    home: Path
    key: "Key | None"
    model: str
    remark: str

    @property
    def title(self) -> list[str]:
        """The model's name, device and kernels, and KV precision; empty while no model is open."""

    def open(self, name: str | None, model: str | None, told: Told) -> "Session":
        """Opens a session by name, with `model`, or else with the one that it was made with.

        name: one that is not there yet is a new session's; None is the last session, or a new one
        told: hears how far loading is, on the calling thread
        Raises LlamayError.
        """

    def close(self) -> None:
        """Lets the model go; sessions are closed before."""


class EngineHost:
    """The host of real engines; models that were used are remembered by their weights."""

    def __init__(
        self,
        home: Path,
        load: Load,
        *,
        model: str,
        settings: Mapping[str, Any] | None = None,
        key: "Key | None" = None,
    ) -> None:
        """load: opens a model by name; model: for new sessions, as settings are, by their names."""
        self.home = home
        self.key = key
        self.model = model
        self.remark = ""
        self._load = load
        self._new_model = model
        self._settings = settings or {}
        self._engine: Engine | None = None

    @property
    def title(self) -> list[str]:
        """See `Host`."""
        if self._engine is None:
            return []
        kernels = self._engine.model.decoder.kernels.name
        precision = self._engine.cache.store.layout.precision.value
        is_file = self.model.endswith(".gguf")
        return [Path(self.model).stem if is_file else self.model, kernels, f"kv {precision}"]

    def open(self, name: str | None, model: str | None, told: Told) -> "Session":
        """See `Host`."""
        # Here, because the screens are there sooner without the engine.
        from llamay.session import Session
        from llamay.session.catalog import Catalog

        self.remark = ""
        catalog = Catalog(self.home)
        known = name or catalog.last()
        if known is None or not self._exists(catalog, known):
            return self._create(name, model or self._new_model, told)
        info = catalog.read(known, self.key).tree.info
        made_with = self._models_used().get(info.weights_sha256 or "")
        if made_with is None:
            is_here = info.model is not None and Path(info.model).is_file()
            made_with = info.model if info.model and is_here else self._new_model
        engine: Engine | None = None
        try:
            engine = self._open_model(model or made_with, told)
        except LlamayError as error:
            self.remark = f"{info.model or made_with} cannot be opened: {error}"
        try:
            return Session.open(self.home, known, engine, self.key)
        except SessionBusyError as error:
            if name is not None:
                raise
            session = self._create(None, model or made_with, told)
            self.remark = f"{error}; this is a new session"
            return session

    def close(self) -> None:
        """See `Host`."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _create(self, name: str | None, model: str, told: Told) -> "Session":
        from llamay.session import Session, Settings

        engine = self._open_model(model, told)
        settings = Settings(**self._settings)
        return Session.create(self.home, engine, name, settings=settings, key=self.key)

    def _exists(self, catalog: "Catalog", name: str) -> bool:
        with suppress(LlamayError):
            return catalog.path(name).exists()
        return False

    def _open_model(self, name: str, told: Told) -> "Engine":
        """The model's engine; the one that is open, if it is the same."""
        if self._engine is not None and name == self.model:
            return self._engine
        told(f"opening {name}")

        def progress(label: str, done: int, total: int | None) -> None:
            told(_progress(label, done, total))

        engine = self._load(name, progress)
        self.close()
        self._engine, self.model = engine, name
        self._remember(engine.model.identity(progress).weights_sha256, name)
        return engine

    def _models_used(self) -> dict[str, str]:
        """Names of models by the SHA-256 of their weights."""
        try:
            read = json.loads((self.home / _MODELS_FILE).read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}

    def _remember(self, weights: str, name: str) -> None:
        used = self._models_used()
        if used.get(weights) != name:
            with suppress(OSError):  # the next start then takes the default model
                (self.home / _MODELS_FILE).write_text(json.dumps({**used, weights: name}, indent=2))


def _progress(label: str, done: int, total: int | None) -> str:
    return f"{label}: {size(done)} of {size(total)}" if total else f"{label}: {size(done)}"
