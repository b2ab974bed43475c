import pytest

from llamay.errors import UsageError
from llamay.hub.names import HubFile, LibraryName, is_later_part, parse_name, split_parts

OLLAMA = "registry.ollama.ai"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2:135m", LibraryName(OLLAMA, "library", "smollm2", "135m")),
        ("llama3.2", LibraryName(OLLAMA, "library", "llama3.2", "latest")),
        ("someone/model:q4_K_M", LibraryName(OLLAMA, "someone", "model", "q4_K_M")),
        ("hf.co/owner/repo:Q8_0", LibraryName("hf.co", "owner", "repo", "Q8_0")),
        ("hf:owner/repo/file.gguf", HubFile("owner", "repo", "file.gguf")),
        ("hf:owner/repo/a b/file (1).GGUF", HubFile("owner", "repo", "a b/file (1).GGUF")),
    ],
)
def test_names_are_read(text: str, expected: LibraryName | HubFile) -> None:
    assert parse_name(text) == expected


@pytest.mark.parametrize(
    "text", ["llama3.2:latest", "me/model:1b", "hf.co/me/m:q4", "hf:o/r/f.gguf"]
)
def test_a_name_prints_as_it_is_read(text: str) -> None:
    assert str(parse_name(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "name:",
        ":tag",
        "a b",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "name:../../x",
        "name:a/b",
        "a//b",
        "a/b/c/d",
        "nam\x1be",
        "name\n",
        "-rf",
        "hf:",
        "hf:owner/repo",
        "hf:owner/repo/",
        "hf:/owner/repo/f.gguf",
        "hf:owner/../f.gguf",
        "hf:../repo/f.gguf",
        "hf:owner/repo/../../f.gguf",
        "hf:owner/repo/./f.gguf",
        "hf:owner/repo//f.gguf",
        "hf:owner/repo/.f.gguf",
        "hf:owner/repo/a\\b.gguf",
        "hf:owner/repo/a\x00b.gguf",
        "hf:owner/repo/a\x1b[2Jb.gguf",
        "hf:owner/repo/a\u202eb.gguf",
        "hf:owner/repo/a\udcffb.gguf",
        "hf:owner/repo/model.safetensors",
        "hf:owner/repo/" + "a" * 250 + ".gguf",
    ],
)
def test_malformed_and_unsafe_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_name(text)


def test_the_first_part_of_a_split_model_names_all_parts() -> None:
    # As llama.cpp's gguf-split names them.
    assert split_parts("big-00001-of-00003.gguf") == [
        "big-00001-of-00003.gguf",
        "big-00002-of-00003.gguf",
        "big-00003-of-00003.gguf",
    ]


@pytest.mark.parametrize("file", ["big.gguf", "big-00002-of-00003.gguf", "b-00001-of-00000.gguf"])
def test_other_files_stand_alone(file: str) -> None:
    assert split_parts(file) == [file]


def test_parts_of_a_hub_file_stay_in_its_folder() -> None:
    parts = HubFile("o", "r", "Q4/m-00001-of-00002.gguf").parts()
    assert [part.file for part in parts] == ["Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf"]


def test_later_parts_are_told_from_first_ones() -> None:
    assert is_later_part("m-00002-of-00002.gguf")
    assert not is_later_part("m-00001-of-00002.gguf")
    assert not is_later_part("m.gguf")
