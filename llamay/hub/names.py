"""Model names, checked: what passes here is safe as a path below a store and in a URL."""

import re
import unicodedata
from dataclasses import dataclass
from pathlib import PurePosixPath

from llamay.errors import UsageError

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_SPLIT_FILE = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")

LIBRARY_HOST = "registry.ollama.ai"
LIBRARY_NAMESPACE = "library"


@dataclass(frozen=True, slots=True)
class LibraryName:
    """A name as Ollama writes it, `[[host/]namespace/]name[:tag]`, with defaults filled in."""

    host: str
    namespace: str
    name: str
    tag: str

    def __str__(self) -> str:
        """The shortest spelling that means this name, the tag always given."""
        words = [self.name]
        if self.host != LIBRARY_HOST:
            words = [self.host, self.namespace, self.name]
        elif self.namespace != LIBRARY_NAMESPACE:
            words = [self.namespace, self.name]
        return f"{'/'.join(words)}:{self.tag}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a Hugging Face repository, `hf:owner/repo/file.gguf`; `file` may have folders."""

    owner: str
    repo: str
    file: str

    def __str__(self) -> str:
        """The spelling that `parse_name` takes."""
        return f"hf:{self.owner}/{self.repo}/{self.file}"

    def parts(self) -> list["HubFile"]:
        """All files of the model: itself, or every part if it is the first part of a split one."""
        folder, _, file = self.file.rpartition("/")
        prefix = f"{folder}/" if folder else ""
        return [HubFile(self.owner, self.repo, prefix + part) for part in split_parts(file)]


def parse_name(text: str) -> LibraryName | HubFile:
    """Reads a model's name; raises UsageError for one that is malformed or unsafe."""
    if text.startswith("hf:"):
        return _parse_hub_file(text)
    path, colon, tag = text.partition(":")
    words = path.split("/")
    if not all(map(_is_word, [*words, tag] if colon else words)) or len(words) > 3:
        raise UsageError(
            f"{text!r} is not a model's name: expected name:tag, user/name:tag, "
            "hf:owner/repo/file.gguf or the path of a .gguf file"
        )
    host, namespace, name = [LIBRARY_HOST, LIBRARY_NAMESPACE][: 3 - len(words)] + words
    return LibraryName(host, namespace, name, tag or "latest")


def split_parts(file: str) -> list[str]:
    """Names of all parts of the split model whose first part is `file`, else just `file`.

    The pattern is llama.cpp's: `NAME-00001-of-00003.gguf`, counted from 1.
    """
    match = _SPLIT_FILE.fullmatch(file)
    if match is None or int(match["part"]) != 1 or int(match["parts"]) < 1:
        return [file]
    count = int(match["parts"])
    return [f"{match['stem']}-{part:05}-of-{count:05}.gguf" for part in range(1, count + 1)]


def is_later_part(file: str) -> bool:
    """Whether `file` is a part of a split model, but not the first."""
    match = _SPLIT_FILE.fullmatch(file)
    return match is not None and int(match["part"]) != 1


def _parse_hub_file(text: str) -> HubFile:
    words = text.removeprefix("hf:").split("/")
    if len(words) < 3 or not all(map(_is_word, words[:2])) or not all(map(_is_safe, words[2:])):
        raise UsageError(
            f"{text!r} is not a file of the hub: expected hf:owner/repo/file.gguf, "
            "without '..', empty parts or control characters"
        )
    if PurePosixPath(words[-1]).suffix.lower() != ".gguf":
        raise UsageError(f"{text!r} does not name a GGUF file: expected a name that ends in .gguf")
    return HubFile(words[0], words[1], "/".join(words[2:]))


def _is_word(word: str) -> bool:
    return _WORD.fullmatch(word) is not None and ".." not in word


def _is_safe(part: str) -> bool:
    """Whether `part` can be one component of a path here, and prints as what it is."""
    if not part or part.startswith(".") or len(part.encode(errors="replace")) > 200:
        return False
    return "\\" not in part and not any(unicodedata.category(c)[0] == "C" for c in part)
