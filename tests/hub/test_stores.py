import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache

from llamay.errors import HubError, UsageError
from llamay.hub import find_model, pull, resolve
from llamay.hub.stores import list_stored

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_ollama(root: Path, manifest: str, content: bytes = b"weights", digest: str = "") -> Path:
    """Stores a blob and its manifest as `ollama pull` does; returns the blob's path."""
    sha256 = hashlib.sha256(content).hexdigest()
    blob = root / "blobs" / f"sha256-{sha256}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    path = root / "manifests" / manifest
    path.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "0" * 64},
        {
            "mediaType": "application/vnd.ollama.image.model",
            "digest": digest or f"sha256:{sha256}",
            "size": len(content),
        },
    ]
    path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blob


def add_hugging_face(cache: Path, owner: str, repo: str, file: str) -> Path:
    """Stores a file as the hub's own client does: a link in a snapshot to a blob."""
    folder = cache / f"models--{owner}--{repo}"
    blob = folder / "blobs" / hashlib.sha256(file.encode()).hexdigest()
    link = folder / "snapshots" / COMMIT / file
    for path in (blob, link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"weights")
    link.symlink_to(blob)
    (folder / "refs" / "main").write_text(COMMIT)
    return link


def add_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("qwen2.5:0.5b", "registry.ollama.ai/library/qwen2.5/0.5b"),
        ("llama3.2", "registry.ollama.ai/library/llama3.2/latest"),
        ("me/model:tag", "registry.ollama.ai/me/model/tag"),
        ("hf.co/owner/repo:Q8_0", "hf.co/owner/repo/Q8_0"),
    ],
)
def test_ollama_names_lead_to_blobs(home: Path, name: str, manifest: str) -> None:
    blob = add_ollama(home / ".ollama" / "models", manifest)
    assert find_model(name) == blob
    assert pull(name).path == blob


def test_ollama_models_variable_moves_the_store(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/1", b"default place")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    assert find_model("a:1") is None
    blob = add_ollama(home / "elsewhere", "registry.ollama.ai/library/a/1", b"moved")
    assert find_model("a:1") == blob


def test_ollama_comes_before_the_own_store(home: Path) -> None:
    own = add_file(home / "llamay" / "models" / "a" / "1.gguf")
    assert find_model("a:1") == own
    blob = add_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/1")
    assert find_model("a:1") == blob


def test_the_default_model_never_comes_from_ollama(home: Path) -> None:
    add_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/smollm2/135m")
    assert find_model("smollm2:135m") is None


@pytest.mark.parametrize(
    "digest", ["sha256:../../../../etc/passwd", "sha256:" + "g" * 64, "md5:" + "0" * 64, "sha256:"]
)
def test_a_manifest_cannot_lead_out_of_the_blobs(home: Path, digest: str) -> None:
    add_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/1", digest=digest)
    with pytest.raises(HubError, match=r"a/1.*digest.*ollama pull a:1"):
        find_model("a:1")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'{"layers": 1}', b'{"layers": []}', b"\xff", b"[" * 9999],
)
def test_a_damaged_manifest_is_refused_and_not_listed(home: Path, content: bytes) -> None:
    path = home / ".ollama/models/manifests/registry.ollama.ai/library/a/1"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(HubError, match="ollama pull a:1"):
        find_model("a:1")
    assert list(list_stored()) == []


def test_a_missing_blob_is_named(home: Path) -> None:
    blob = add_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/a/1")
    blob.unlink()
    with pytest.raises(HubError, match=blob.name):
        find_model("a:1")


def test_hugging_face_cache_is_found_where_its_client_finds_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = home / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    add_hugging_face(cache, "owner", "repo", "Q4/file.gguf")
    expected = try_to_load_from_cache("owner/repo", "Q4/file.gguf", cache_dir=cache)
    assert str(find_model("hf:owner/repo/Q4/file.gguf")) == expected


@pytest.mark.parametrize(
    ("variable", "folder"),
    [(None, ".cache/huggingface/hub"), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_hugging_face_variables(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, folder: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(home))
    link = add_hugging_face(home / folder, "owner", "repo", "file.gguf")
    assert find_model("hf:owner/repo/file.gguf") == link


def test_a_reference_cannot_lead_out_of_the_snapshots(home: Path) -> None:
    cache = home / ".cache" / "huggingface" / "hub"
    add_hugging_face(cache, "owner", "repo", "file.gguf")
    add_file(home / "file.gguf")
    (cache / "models--owner--repo" / "refs" / "main").write_text("../../../../..")
    assert find_model("hf:owner/repo/file.gguf") is None


@pytest.mark.parametrize("root", [".lmstudio/models", ".cache/lm-studio/models"])
def test_lm_studio_folders(home: Path, root: str) -> None:
    path = add_file(home / root / "owner" / "repo" / "file.gguf")
    assert find_model("hf:owner/repo/file.gguf") == path


def test_a_split_model_is_found_only_whole(home: Path) -> None:
    folder = home / "llamay" / "models" / "hf" / "owner" / "repo"
    first = add_file(folder / "m-00001-of-00002.gguf")
    assert find_model("hf:owner/repo/m-00001-of-00002.gguf") is None
    add_file(folder / "m-00002-of-00002.gguf")
    assert find_model("hf:owner/repo/m-00001-of-00002.gguf") == first


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = add_file(tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    assert find_model(str(path)) == path
    assert find_model("model.gguf") == Path("model.gguf")
    blob = add_file(tmp_path / "blobs" / "sha256-0")
    assert resolve(str(blob)) == blob


@pytest.mark.parametrize(
    ("name", "found"),
    [("missing.gguf", "no file"), ("./missing", "no file"), ("folder.gguf", "a folder")],
)
def test_a_path_without_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(HubError, match=f"{name}.*{found}"):
        find_model(name)


def test_a_name_that_nobody_has_gets_a_remedy() -> None:
    with pytest.raises(HubError, match=r"ollama pull qwen2\.5:0\.5b"):
        resolve("qwen2.5:0.5b")
    with pytest.raises(UsageError):
        resolve("no such model")


def test_listed_names_find_the_listed_files(home: Path) -> None:
    own = home / "llamay" / "models"
    expected = {
        add_file(own / "smollm2" / "135m.gguf"): "smollm2:135m",
        add_file(own / "me" / "model" / "tag.gguf"): "me/model:tag",
        add_file(own / "hf" / "owner" / "repo" / "Q4" / "f.gguf"): "hf:owner/repo/Q4/f.gguf",
        add_ollama(home / ".ollama/models", "registry.ollama.ai/library/q/0.5b"): "q:0.5b",
        add_ollama(home / ".ollama/models", "hf.co/o/r/Q8", b"other"): "hf.co/o/r:Q8",
        add_hugging_face(
            home / ".cache/huggingface/hub", "o", "r--s", "f.gguf"
        ): "hf:o/r--s/f.gguf",
        add_file(home / ".lmstudio/models/pub/repo/x.gguf"): "hf:pub/repo/x.gguf",
        add_file(home / ".lmstudio/models/pub/repo/s-00001-of-00002.gguf"): (
            "hf:pub/repo/s-00001-of-00002.gguf"
        ),
        add_file(own / "dropped.gguf"): str(own / "dropped.gguf"),
        add_file(own / "odd name" / "file.gguf"): str(own / "odd name" / "file.gguf"),
    }
    add_file(home / ".lmstudio/models/pub/repo/s-00002-of-00002.gguf")
    add_file(own / "smollm2" / "1.7b.gguf.part")
    add_file(own / "smollm2" / "README.md")
    assert {stored.path: stored.name for stored in list_stored()} == expected
    for path, name in expected.items():
        assert find_model(name) == path
