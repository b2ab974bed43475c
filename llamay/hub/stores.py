"""Stores of models on this machine: finds names in them and lists what they hold.

Nothing here changes a store. A store that is absent or unreadable is an empty one.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamay.errors import HubError, UsageError
from llamay.hub import paths
from llamay.hub.names import (
    HubFile,
    LibraryName,
    is_later_part,
    parse_name,
    split_parts,
)

OWN, OLLAMA, HUGGING_FACE, LM_STUDIO = "llamay", "Ollama", "Hugging Face cache", "LM Studio"

_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in a store: `path` is its (first) file, and what `-m` takes for it is `name`."""

    name: str
    store: str
    path: Path


def own_path(name: LibraryName | HubFile) -> Path:
    """Where llamay's own store keeps `name`: models/NAME/TAG.gguf, models/hf/OWNER/REPO/FILE."""
    root = paths.models_dir()
    if isinstance(name, HubFile):
        return root / "hf" / name.owner / name.repo / name.file
    words = str(name).rpartition(":")[0].split("/")
    return root.joinpath(*words, f"{name.tag}.gguf")


def find_own(name: LibraryName | HubFile) -> Path | None:
    """The file of `name` in llamay's own store, complete with all parts if it is split."""
    return _complete(own_path(name))


def find_ollama(name: LibraryName) -> Path | None:
    """The blob that Ollama's manifest for `name` gives as its weights.

    Raises HubError if there is a manifest, but it or its blob is unusable.
    """
    for root in paths.ollama_dirs():
        manifest = root / "manifests" / name.host / name.namespace / name.name / name.tag
        if _is_file(manifest):
            return _ollama_blob(root, manifest, name)
    return None


def find_hugging_face(name: HubFile) -> Path | None:
    """`name` in the snapshot of the Hugging Face cache that its branch `main` points to."""
    snapshot = _main_snapshot(paths.hugging_face_dir() / f"models--{name.owner}--{name.repo}")
    return _complete(snapshot / name.file) if snapshot else None


def find_lm_studio(name: HubFile) -> Path | None:
    """`name` in LM Studio's folders."""
    for root in paths.lm_studio_dirs():
        if path := _complete(root / name.owner / name.repo / name.file):
            return path
    return None


def list_stored() -> Iterator[Stored]:
    """Every model in every store; a split one once, by its first part."""
    yield from _list_own()
    yield from _list_ollama()
    yield from _list_hugging_face()
    yield from _list_lm_studio()


def model_files(path: Path) -> list[Path]:
    """The file at `path` and, if it is the first part of a split model, the other parts' paths."""
    return [path.with_name(file) for file in split_parts(path.name)]


def _list_own() -> Iterator[Stored]:
    root = paths.models_dir()
    for path in _gguf_files(root):
        words = path.relative_to(root).parts
        name = "/".join(words[:-1]) + ":" + path.stem
        if len(words) >= 4 and words[0] == "hf":
            name = "hf:" + "/".join(words[1:])
        # A file that somebody put there under a name that cannot be asked for goes by its path.
        yield Stored(name if _names_own(name, path) else str(path), OWN, path)


def _list_ollama() -> Iterator[Stored]:
    for root in paths.ollama_dirs():
        manifests = root / "manifests"
        for manifest in sorted(manifests.glob("*/*/*/*")):
            name = LibraryName(*manifest.relative_to(manifests).parts)
            try:
                path = _ollama_blob(root, manifest, name)
            except HubError:
                continue
            yield Stored(str(name), OLLAMA, path)


def _list_hugging_face() -> Iterator[Stored]:
    for repo in sorted(paths.hugging_face_dir().glob("models--*--*")):
        owner, name = repo.name.removeprefix("models--").split("--", 1)
        snapshot = _main_snapshot(repo)
        for path in _gguf_files(snapshot) if snapshot else ():
            file = path.relative_to(snapshot).as_posix() if snapshot else ""
            yield Stored(str(HubFile(owner, name, file)), HUGGING_FACE, path)


def _list_lm_studio() -> Iterator[Stored]:
    for root in paths.lm_studio_dirs():
        for path in _gguf_files(root):
            words = path.relative_to(root).parts
            name = "hf:" + "/".join(words) if len(words) >= 3 else str(path)
            yield Stored(name, LM_STUDIO, path)


def _gguf_files(root: Path) -> list[Path]:
    files = (path for path in root.rglob("*") if path.suffix.lower() == ".gguf")
    return sorted(path for path in files if _is_file(path) and not is_later_part(path.name))


def _main_snapshot(repo: Path) -> Path | None:
    try:
        commit = (repo / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        return None
    return repo / "snapshots" / commit if re.fullmatch(r"[0-9a-f]{1,64}", commit) else None


def _ollama_blob(root: Path, manifest: Path, name: LibraryName) -> Path:
    remedy = f"repeat `ollama pull {name}`"
    try:
        with manifest.open("rb") as file:
            content = json.loads(file.read(_MAX_MANIFEST_BYTES))
        digests = [
            layer["digest"] for layer in content["layers"] if layer["mediaType"] == _MODEL_LAYER
        ]
        digest = _DIGEST.fullmatch(digests[0])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        digest = None
    if digest is None:
        raise HubError(
            f"{manifest}: expected an Ollama manifest with a layer of type {_MODEL_LAYER} and its "
            f"sha256 digest, and found none; {remedy}"
        )
    blob = root / "blobs" / f"sha256-{digest[1]}"
    if not _is_file(blob):
        raise HubError(
            f"{blob}: Ollama's manifest for {name} names this file, and it is not there; {remedy}"
        )
    return blob


def _names_own(name: str, path: Path) -> bool:
    try:
        return own_path(parse_name(name)) == path
    except UsageError:
        return False


def _complete(path: Path) -> Path | None:
    return path if all(map(_is_file, model_files(path))) else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False
