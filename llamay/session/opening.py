"""Opening a session's files, and why it can only be read then."""

from pathlib import Path

from llamay.engine import Engine
from llamay.errors import SessionError
from llamay.kv.snapshot import Key
from llamay.session.catalog import Catalog
from llamay.session.folder import SessionFolder
from llamay.session.loading import Loaded


def open_files(
    home: Path, name: str, engine: Engine | None, key: Key | None
) -> tuple[SessionFolder | Loaded, str | None]:
    """The session's files, open for writing if they can be and there is an engine.

    Returns why the session is read-only too, or None.
    Raises SessionBusyError if a process has it open, and what `Catalog.open` raises.
    """
    catalog = Catalog(home)
    if engine is None:
        return catalog.read(name, key), "its model is not here; choose another to continue with"
    try:
        folder = catalog.open(name, key)
    except SessionError as error:
        if type(error) is not SessionError:
            raise
        return catalog.read(name, key), str(error)
    info = folder.tree.info
    if info.weights_sha256 in (None, engine.model.identity().weights_sha256):
        return folder, None
    return folder, (
        f"it was made with {info.model or 'another model'}, and this is {engine.model.name} with "
        "other weights; continue with this model to have it read the text"
    )
