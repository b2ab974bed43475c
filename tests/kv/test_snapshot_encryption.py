"""Encrypted snapshots: the right key opens them, and nothing else does."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from llamay.errors import SnapshotCorruptError, SnapshotKeyError
from llamay.formats import KVPrecision
from llamay.kv.snapshot import (
    Key,
    convert_snapshot,
    encryption,
    format,
    read_snapshot,
    show_snapshot,
    write_snapshot,
)
from tests.kv.row_kernels import IDENTITY, VOCAB, f32_rows, fill, new_cache, rows_of, state_of

KEY = Key(bytes(range(32)))
TOKENS = [3, 1, 4, 1, 5]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "GROUP", 1)
    monkeypatch.setattr(format, "CHUNK_BYTES", 300)  # 2 positions
    monkeypatch.setattr(encryption, "SCRYPT_N", 2**6)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_snapshot(fill(new_cache(), TOKENS, logits=True), tmp_path / "x", IDENTITY, key=KEY)
    return tmp_path / "x"


def head_of(data: bytes) -> tuple[bytes, dict[str, object]]:
    """The bytes [0, 16 + H), and the header."""
    head = data[: 16 + struct.unpack_from("<I", data, 12)[0]]
    return head, json.loads(head[16:])


@pytest.mark.parametrize(
    "key", [KEY, Key.random(), Key.from_passphrase("correct horse")], ids=["file", "random", "text"]
)
@pytest.mark.parametrize("kv", KVPrecision)
def test_right_key_gives_back_the_same_context(tmp_path: Path, key: Key, kv: KVPrecision) -> None:
    cache = new_cache(precision=kv)
    context = fill(cache, TOKENS, logits=True)
    write_snapshot(context, tmp_path / "x", IDENTITY, key=key, kv=kv)
    again = read_snapshot(cache, tmp_path / "x", IDENTITY, key=key)
    assert again.exact
    assert rows_of(cache, again.context) == rows_of(cache, context)
    assert list(again.context.tokens) == TOKENS


def test_chunks_are_aes_gcm_as_the_docstring_says(path: Path) -> None:
    data = path.read_bytes()
    head, header = head_of(data)
    fields = header["encryption"]
    assert isinstance(fields, dict)
    hkdf = HKDF(SHA256(), 48, salt=bytes.fromhex(fields["salt"]), info=b"llamay snapshot")
    derived = hkdf.derive(bytes(range(32)))
    assert derived[32:].hex() == fields["check"]
    at, plain = len(head) + 16, []
    for index, size in enumerate([4 * (5 + VOCAB), 256, 256, 128]):
        nonce = bytes.fromhex(fields["nonce"]) + struct.pack("<I", index)
        aad = head + struct.pack("<QQ", index, 4)
        plain.append(AESGCM(derived[:32]).decrypt(nonce, data[at : at + size + 16], aad))
        at += size + 16
    assert np.frombuffer(plain[0], "<i4", 5).tolist() == TOKENS
    assert b"".join(plain[1:]) == f32_rows(5, new_cache().store.layout).tobytes()
    assert len(data) == at + 16 * 5


def test_nothing_of_the_context_is_in_the_clear(path: Path) -> None:
    data = path.read_bytes()
    rows = f32_rows(5, new_cache().store.layout).tobytes()
    assert struct.pack("<3i", 3, 1, 4) not in data
    assert not any(rows[at : at + 16] in data for at in range(0, len(rows), 16))


def test_salt_and_nonce_are_never_used_twice(path: Path) -> None:
    first = head_of(path.read_bytes())[1]["encryption"]
    write_snapshot(fill(new_cache(), TOKENS), path, IDENTITY, key=KEY)
    second = head_of(path.read_bytes())[1]["encryption"]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert all(first[name] != second[name] for name in ("salt", "nonce", "check"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (Key(bytes(32)), "another key file"),
        (None, "give its key file"),
        (Key.from_passphrase("x"), "found a passphrase"),
    ],
)
def test_wrong_key_is_its_own_error(path: Path, key: Key | None, message: str) -> None:
    cache = new_cache()
    with pytest.raises(SnapshotKeyError, match=message) as refused:
        read_snapshot(cache, path, IDENTITY, key=key)
    assert str(path) in str(refused.value)
    assert state_of(cache) == state_of(new_cache())


def test_wrong_passphrase_is_refused(tmp_path: Path) -> None:
    key = Key.from_passphrase("correct horse")
    write_snapshot(fill(new_cache(), TOKENS), tmp_path / "x", IDENTITY, key=key)
    with pytest.raises(SnapshotKeyError, match="another passphrase"):
        read_snapshot(new_cache(), tmp_path / "x", IDENTITY, key=Key.from_passphrase("Correct"))


def test_passphrase_does_not_depend_on_how_letters_are_composed() -> None:
    assert Key.from_passphrase("caf\u00e9") == Key.from_passphrase("cafe\u0301")


def test_key_is_not_in_its_repr() -> None:
    assert "secret" not in repr(Key.from_passphrase("secret"))


def test_key_for_a_plain_snapshot_is_refused(tmp_path: Path) -> None:
    write_snapshot(fill(new_cache(), TOKENS), tmp_path / "x", IDENTITY)
    with pytest.raises(SnapshotKeyError, match="not encrypted"):
        read_snapshot(new_cache(), tmp_path / "x", IDENTITY, key=KEY)


def reseal(data: bytes, chunks: list[bytes], head: bytes) -> bytes:
    """A file of these stored chunks with the digests that anybody can compute."""
    start = head + xxhash.xxh3_128_digest(head)
    table = b"".join(map(xxhash.xxh3_128_digest, chunks))
    return start + b"".join(chunks) + table + xxhash.xxh3_128_digest(start + table)


def test_what_was_altered_on_purpose_is_refused(path: Path) -> None:
    data = path.read_bytes()
    head, _ = head_of(data)
    at, chunks = len(head) + 16, []
    for size in [4 * (5 + VOCAB) + 16, 272, 272, 144]:
        chunks.append(data[at : at + size])
        at += size
    assert reseal(data, chunks, head) == data
    swapped = [chunks[0], chunks[2], chunks[1], chunks[3]]
    flipped = [chunks[0], bytes([chunks[1][0] ^ 1]) + chunks[1][1:], *chunks[2:]]
    other_owner = head.replace(b'"owner": ""', b'"owner":"e"')
    fewer = head.replace(b'"tokens": 5', b'"tokens": 4')
    assert len(other_owner) == len(fewer) == len(head)
    shorter = [chunks[0][:-4], *chunks[1:3]]
    for name, made in [
        ("swapped", reseal(data, swapped, head)),
        ("flipped", reseal(data, flipped, head)),
        ("header", reseal(data, chunks, other_owner)),
        ("cut", reseal(data, shorter, fewer)),
    ]:
        path.write_bytes(made)
        cache = new_cache()
        with pytest.raises(SnapshotCorruptError, match="is not what its key encrypted"):
            read_snapshot(cache, path, IDENTITY, key=KEY)
        assert state_of(cache) == state_of(new_cache()), name


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ({"n": 2**25}, "268435456 bytes"),
        ({"r": 2**20}, "bytes to try"),
        ({"n": 3}, "n = 3"),
        ({"n": 0}, "n = 0"),
        ({"n": 1}, "n = 1"),
        ({"p": 5}, "p = 5"),
        ({"p": 0}, "p = 0"),
        ({"r": 1}, "r = 1"),
        ({"kdf": "md5"}, "unknown encryption"),
        ({"salt": "00"}, "unknown encryption"),
        ({"nonce": ""}, "unknown encryption"),
        ({"check": "zz"}, "cannot be read"),
    ],
)
def test_cost_that_a_file_asks_for_is_bounded(
    tmp_path: Path, cost: dict[str, object], message: str
) -> None:
    path, key = tmp_path / "x", Key.from_passphrase("x")
    write_snapshot(fill(new_cache(), []), path, IDENTITY, key=key)
    data = path.read_bytes()
    _, header = head_of(data)
    fields = header["encryption"]
    assert isinstance(fields, dict)
    fields.update(cost)
    text = json.dumps(header).encode()
    head = struct.pack("<8sHHI", b"LLAMAYCX", 3, 3, len(text)) + text
    path.write_bytes(reseal(data, [bytes(16)], head))
    if message == "268435456 bytes":
        message = "its passphrase would take 34359738368 bytes"
    with pytest.raises(SnapshotCorruptError, match=message):
        read_snapshot(new_cache(), path, IDENTITY, key=key)


def test_key_file_has_32_bytes(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    assert Key.from_file(path) == KEY
    for content, found in [(b"", "found 0"), (bytes(31), "found 31"), (bytes(33), "more than 32")]:
        path.write_bytes(content)
        with pytest.raises(SnapshotKeyError, match=found):
            Key.from_file(path)
    with pytest.raises(SnapshotKeyError, match="No such file"):
        Key.from_file(tmp_path / "none")
    with pytest.raises(SnapshotKeyError, match="empty"):
        Key.from_passphrase("")


def test_show_needs_no_key_and_checks_more_with_it(path: Path) -> None:
    without, with_key = show_snapshot(path), show_snapshot(path, key=KEY)
    assert without.header.tokens == with_key.header.tokens == 5
    assert [check.result for check in without.checks] == ["pass", "pass", "note"]
    assert [check.result for check in with_key.checks] == ["pass", "pass", "pass"]
    with pytest.raises(SnapshotKeyError, match="another key file"):
        show_snapshot(path, key=Key(bytes(32)))


def test_convert_encrypts_and_decrypts(path: Path) -> None:
    clear = path.with_name("clear")
    convert_snapshot(path, clear, key=KEY)
    assert show_snapshot(clear).header.encryption is None
    text = Key.from_passphrase("x")
    convert_snapshot(clear, path, target_key=text)
    cache = new_cache()
    again = read_snapshot(cache, path, IDENTITY, key=text)
    assert rows_of(cache, again.context) == rows_of(cache, fill(cache, TOKENS))
