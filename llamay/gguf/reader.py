"""Opens GGUF files, split ones too, as metadata and views into the mapped bytes."""

import mmap
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, overload

import numpy as np

from llamay.errors import GGUFError
from llamay.formats import Tensor
from llamay.gguf.header import Header, read_header, shown

T = TypeVar("T")
D = TypeVar("D")


class _Required:
    """The type of `REQUIRED`, the default that says that a key must be there."""


REQUIRED: Final = _Required()

_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class GGUFFile:
    """An open GGUF file; made by `open_gguf`, read-only, and usable from several threads.

    path:     the file that was opened (the first part of a split file)
    paths:    all parts in order; one if the file is not split
    metadata: the first part's keys in file order: int, float, bool, str, a list for an array of
              strings (or of arrays), a read-only numpy array for an array of numbers or bools;
              bytes of a string that are not UTF-8 are lone surrogates (`surrogateescape`)
    tensors:  name -> Tensor, in file order; `data` is a read-only view into the mapped file
    source:   the parts' paths, sizes, dates and inodes, which a file that is changed does not keep
    """

    def __init__(
        self,
        paths: tuple[Path, ...],
        metadata: dict[str, Any],
        tensors: dict[str, Tensor],
        maps: tuple[mmap.mmap, ...],
        source: str = "",
    ) -> None:
        self.path = paths[0]
        self.paths = paths
        self.metadata: Mapping[str, Any] = MappingProxyType(metadata)
        self.tensors = tensors
        self.source = source
        self._maps = maps

    @overload
    def get(self, key: str, kind: type[T]) -> T: ...
    @overload
    def get(self, key: str, kind: type[T], default: D) -> T | D: ...
    def get(self, key: str, kind: type[Any], default: Any = REQUIRED) -> Any:
        """The value of `key`, which must be of `kind`; `default`, if given, when it is absent.

        kind: int, float (an integer is converted), bool, str, list (an array of strings or of
              arrays) or np.ndarray (an array of numbers or bools)
        Raises GGUFError if the value is of another kind, or absent and no default is given.
        """
        return _typed(self.path, self.metadata, key, kind, default)

    def check_size(self) -> None:
        """Raises GGUFError if a part is now shorter than when it was opened.

        Touching mapped bytes past the end of a file kills the process (SIGBUS), so whoever is
        about to read all weights calls this first.
        """
        for path, mapped in zip(self.paths, self._maps, strict=False):  # no maps once closed
            if mapped.size() < len(mapped):
                raise GGUFError(
                    f"{path}: expected {len(mapped)} bytes as when it was opened, found "
                    f"{mapped.size()}; another program cut the file, download it again"
                )

    def close(self) -> None:
        """Forgets the tensors; metadata stays. A second call does nothing.

        Views taken before stay valid: each part is unmapped when the last of them is gone.
        """
        self.tensors = {}
        self._maps = ()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file, or all parts of a split one given its first; reads headers only.

    Raises GGUFError if a part is missing, unreadable or damaged, and UnsupportedModelError if a
    tensor has a type that llamay does not compute with; no part stays mapped then.
    """
    path = Path(path)
    mapped, stamp = _map(path)
    paths, maps, stamps = [path], [mapped], [stamp]
    headers = [read_header(path, mapped)]
    for part in _other_parts(path, headers[0].metadata):
        mapped, stamp = _map(part)
        paths.append(part)
        maps.append(mapped)
        stamps.append(stamp)
        headers.append(read_header(part, mapped))
    _check_parts(paths, headers)
    tensors = _tensors(paths, headers, maps)
    return GGUFFile(tuple(paths), headers[0].metadata, tensors, tuple(maps), "\n".join(stamps))


def source_now(paths: Sequence[Path]) -> str:
    """What the `source` of a file with these parts would be now. Raises OSError."""
    return "\n".join(_stamp(path, path.stat()) for path in paths)


def _map(path: Path) -> tuple[mmap.mmap, str]:
    """The file, mapped read-only, and what tells it from others and from what it may become.

    Only regular files are opened, as a pipe would block.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            found = "a directory" if stat.S_ISDIR(mode) else "neither a file nor a directory"
            raise GGUFError(f"{path}: expected a GGUF file, found {found}; give a file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise GGUFError(
                    f"{path}: expected a GGUF file, found an empty file; download it again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), _stamp(path, status)
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # a NUL in the path, or emptied since fstat
        reason = str(error)
    raise GGUFError(
        f"{path}: expected a readable GGUF file, found: {reason}; check the path and permissions"
    )


def _stamp(path: Path, status: os.stat_result) -> str:
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _other_parts(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The paths of parts 2.. of a split file whose first part is `path`; [] if it is not split.

    Parts are named NAME-00001-of-00003.gguf and so on, and `split.no` counts from 0.
    """
    count = _typed(path, metadata, "split.count", int, 1)
    if count <= 1:
        return []
    number = _typed(path, metadata, "split.no", int, REQUIRED)
    match = _PART_NAME.fullmatch(path.name)
    if number != 0:
        first = f"{match[1]}-00001-of-{count:05d}.gguf" if match else "NAME-00001-of-..."
        raise GGUFError(
            f"{path}: expected the first part of a split model, found part {number + 1} of "
            f"{count}; open {first} instead"
        )
    if not match or (int(match[2]), int(match[3])) != (1, count):
        raise GGUFError(
            f"{path}: expected the name NAME-00001-of-{count:05d}.gguf for the first of {count} "
            f"parts, found {path.name}; rename the parts so that the others can be found"
        )
    parts = [path.with_name(f"{match[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]
    for i, part in enumerate(parts, 2):
        if not os.path.exists(part):  # Path.exists raises where this says no
            raise GGUFError(
                f"{path}: expected part {i} of {count} beside it, found no {part.name}; "
                "download the missing part"
            )
    return parts


def _check_parts(paths: list[Path], headers: list[Header]) -> None:
    """Checks that the parts belong together: number, count, and tensors in all."""
    if len(paths) == 1:
        return
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        number = _typed(path, header.metadata, "split.no", int, REQUIRED)
        count = _typed(path, header.metadata, "split.count", int, REQUIRED)
        if (number, count) != (index, len(paths)):
            raise GGUFError(
                f"{path}: expected part {index + 1} of {len(paths)}, found part {number + 1} of "
                f"{count}; download the parts again"
            )
    found = sum(len(header.tensors) for header in headers)
    expected = _typed(paths[0], headers[0].metadata, "split.tensors.count", int, found)
    if found != expected:
        raise GGUFError(
            f"{paths[0]}: expected {expected} tensors in all {len(paths)} parts, found {found}; "
            "download the parts again"
        )


def _tensors(paths: list[Path], headers: list[Header], maps: list[mmap.mmap]) -> dict[str, Tensor]:
    """The tensors of all parts, as views; refuses a name that two parts have."""
    tensors: dict[str, Tensor] = {}
    for path, header, mapped in zip(paths, headers, maps, strict=True):
        view = memoryview(mapped)
        for info in header.tensors:
            if info.name in tensors:
                raise GGUFError(
                    f"{path}: tensor {shown(info.name)}: expected it in one part, found it in an "
                    "earlier part too; download the parts again"
                )
            data = view[info.start : info.start + info.num_bytes]
            tensors[info.name] = Tensor(info.name, info.format, info.shape, data)
    return tensors


_KIND_NAMES = {
    bool: "a bool",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "a list",
    np.ndarray: "an array of numbers",
}


def _typed(path: Path, metadata: Mapping[str, Any], key: str, kind: type[Any], default: Any) -> Any:
    """See `GGUFFile.get`."""
    value = metadata.get(key)
    if value is None:
        if default is REQUIRED:
            raise GGUFError(
                f"{path}: key {shown(key)}: expected {_KIND_NAMES[kind]}, found no such key; "
                "use a complete conversion of the model"
            )
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:  # not isinstance: a bool is no integer here
        raise GGUFError(
            f"{path}: key {shown(key)}: expected {_KIND_NAMES[kind]}, found "
            f"{_KIND_NAMES[type(value)]}; use a complete conversion of the model"
        )
    return value
