"""`session.json`: the whole tree as of one record of the journal.

A JSON object in ASCII whose first two lines are enough to list the session:

    {"llamay_session":1,"oldest_reader":1,"digest":"<32 hex digits>",
    "summary":{...},
    "id":"<32 hex digits>","sequence":n,"encryption":null,"content":{the tree}}

The digest, XXH3 of 128 bits, is of everything but its own digits; this line is the same in every
version. Encrypted, the summary is null and `content` is base64 of AES-256-GCM ciphertext of both;
id and sequence are authenticated.
"""

import json
import re
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llamay.errors import (
    SessionCorruptError,
    SessionError,
    SessionKeyError,
    SessionVersionError,
    SnapshotCorruptError,
)
from llamay.kv.snapshot import Key
from llamay.kv.snapshot.format import digest
from llamay.session.files import new_cipher, open_cipher
from llamay.session.tree import Tree
from llamay.session.tree_json import tree_from_json, tree_to_json

VERSION = 1

_FIRST_LINE = re.compile(
    rb'\{"llamay_session":(\d{1,9}),"oldest_reader":(\d{1,9}),"digest":"([0-9a-f]{32})",\n'
)
_MAX_LINE_BYTES = 65536
_MAX_TITLE = 200
_BYTES_FIELDS = ("salt", "nonce", "check")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a list says of a session.

    tokens:   of all visible turns, shared ones once
    branches: visible leaves
    parent:   the id of the session that it is a copy of
    updated:  seconds since 1970
    sequence: number of the last record in it
    """

    id: str
    sequence: int
    title: str
    tokens: int
    branches: int
    parent: str | None
    model: str | None
    created: float
    updated: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """A tree up to and with record `sequence`; id: the session's, 16 bytes."""

    id: bytes
    sequence: int
    tree: Tree
    encrypted: bool


def summarise(session_id: bytes, sequence: int, tree: Tree, updated: float) -> Summary:
    """What a list says of a tree."""
    seen = list(tree.walk())
    first = next((tree.node(id) for id in seen if tree.node(id).role == "user"), tree.root)
    return Summary(
        id=session_id.hex(),
        sequence=sequence,
        title=(tree.info.title or first.preview(80))[:_MAX_TITLE],
        tokens=sum(len(tree.node(id).ids) for id in seen),
        branches=len(tree.leaves()),
        parent=tree.info.parent,
        model=tree.info.model,
        created=tree.info.created,
        updated=updated,
    )


def encode_manifest(
    path: Path, session_id: bytes, sequence: int, tree: Tree, key: Key | None, updated: float
) -> bytes:
    """The file's bytes; `path` names it in errors."""
    summary: Any = asdict(summarise(session_id, sequence, tree, updated))
    content: Any = tree_to_json(tree)
    encryption, cipher = new_cipher(path, key)
    stored = None
    if encryption and cipher:
        text = json.dumps({"summary": summary, "tree": content}).encode("ascii")
        head = _authenticated(session_id, sequence)
        content = b64encode(cipher.encrypt(head, 0, 1, memoryview(text))).decode("ascii")
        stored = {name: getattr(encryption, name).hex() for name in _BYTES_FIELDS}
        summary = None
    rest = {"id": session_id.hex(), "sequence": sequence, "encryption": stored, "content": content}
    lines = f'"summary":{json.dumps(summary)},\n{json.dumps(rest)[1:]}\n'.encode("ascii")
    start = f'{{"llamay_session":{VERSION},"oldest_reader":{VERSION},"digest":"'.encode("ascii")
    return start + digest(start, b'",\n', lines).hex().encode("ascii") + b'",\n' + lines


def read_manifest(path: Path, key: Key | None) -> Manifest:
    """The tree in the file, its digest checked.

    Raises SessionCorruptError if it is damaged, SessionVersionError if it is newer, and
    SessionKeyError if it is encrypted and `key` is missing or another one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SessionError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    _check_first_line(path, data)
    try:
        value = json.loads(data)
        session_id, sequence = bytes.fromhex(value["id"]), int(value["sequence"])
        content, encrypted = value["content"], value["encryption"] is not None
        if encrypted:
            content = _decrypted(path, value, session_id, sequence, key)["tree"]
        elif key:
            raise SessionKeyError(
                f"{path.parent}: the session is not encrypted; leave --context-key out"
            )
        return Manifest(session_id, sequence, tree_from_json(content), encrypted)
    except SnapshotCorruptError:
        raise damaged(path, "its content is not what its key encrypted") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise damaged(path, f"its content makes no sense ({error!r})") from None


def read_summary(path: Path, key: Key | None) -> Summary | None:
    """What a list says of the session; None if it is encrypted and there is no `key`.

    Of a file that is not encrypted only the beginning is read, so damage may not be noticed.
    Raises as `read_manifest`, and OSError.
    """
    with path.open("rb") as file:
        first, second = file.readline(_MAX_LINE_BYTES), file.readline(_MAX_LINE_BYTES)
        match = _FIRST_LINE.fullmatch(first)
        if match is None:
            raise damaged(path, "it does not begin as a session does")
        _check_version(path, match)
        try:
            value = json.loads(b"{" + second.rstrip(b",\n") + b"}")["summary"]
            if value is None:
                if key is None:
                    return None
                value = json.loads(first + second + file.read())
                session_id, sequence = bytes.fromhex(value["id"]), int(value["sequence"])
                value = _decrypted(path, value, session_id, sequence, key)["summary"]
            return Summary(**value)
        except SnapshotCorruptError:
            raise damaged(path, "its content is not what its key encrypted") from None
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise damaged(path, f"its summary makes no sense ({error!r})") from None


def damaged(path: Path, what: str) -> SessionCorruptError:
    """What to raise for a file whose bytes are not what was written."""
    return SessionCorruptError(f"{path}: the file is damaged ({what}); restore it from a backup")


def _check_first_line(path: Path, data: bytes) -> None:
    match = _FIRST_LINE.match(data)
    if match is None:
        raise damaged(path, "it does not begin as a session does")
    start, end = match.span(3)
    if digest(data[:start], data[end:]).hex().encode("ascii") != match[3]:
        raise damaged(path, "its digest is wrong")
    _check_version(path, match)


def _check_version(path: Path, first_line: "re.Match[bytes]") -> None:
    version, oldest_reader = int(first_line[1]), int(first_line[2])
    if oldest_reader > VERSION:
        raise SessionVersionError(
            f"{path}: the session (version {version}) needs a reader of version {oldest_reader}, "
            f"and this one is of version {VERSION}; update llamay"
        )


def _decrypted(
    path: Path, value: dict[str, Any], session_id: bytes, sequence: int, key: Key | None
) -> Any:
    stored = value["encryption"]
    salt, nonce, check = (bytes.fromhex(stored[name]) for name in _BYTES_FIELDS)
    cipher = open_cipher(path, salt, nonce, check, key)
    sealed = b64decode(value["content"], validate=True)
    head = _authenticated(session_id, sequence)
    return json.loads(cipher.decrypt(path, head, 0, 1, memoryview(sealed)))


def _authenticated(session_id: bytes, sequence: int) -> bytes:
    return b"llamay session.json" + session_id + sequence.to_bytes(8, "little")
