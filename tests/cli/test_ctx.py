import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamay import cli
from llamay.engine import Engine
from llamay.formats import KVPrecision
from llamay.hub import Progress, weights_digest
from llamay.kv.snapshot import read_snapshot, write_segment, write_snapshot
from tests.gguf_writer import write_gguf
from tests.kv.row_kernels import as_version_2
from tests.scripted_model import write_endless_model
from tests.tiny_models import TinyConfig, tiny_metadata, tiny_tensors, write_tiny_model

GOLDEN = Path(__file__).parents[2] / "testdata" / "snapshots"
# 67 tokens, which end within pages of 64, of 16 and of 128.
PROMPT = "It was the best of times, it was the worst of times, it was the age of wisdom, and in "
ANSWER = ("--max-tokens", "40", "--seed", "5")

Run = Callable[..., tuple[int, str, str]]
RunJson = Callable[..., dict[str, Any]]
Sentence = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not end by themselves."""
    path = tmp_path_factory.mktemp("ctx") / "tiny.gguf"
    write_endless_model(path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty_home: Path) -> Run:
    """Runs llamay with arguments; gives its code, stdout and stderr."""

    def run_llamay(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_llamay


@pytest.fixture
def run_json(run: Run) -> RunJson:
    """Runs a command with --json that ends well; gives the one object that it prints."""

    def run_command(*arguments: object) -> dict[str, Any]:
        code, output, said = run(*arguments, "--json")
        assert code == 0, said
        result = json.loads(output)
        assert isinstance(result, dict)
        return result

    return run_command


@pytest.fixture
def sentence(run: Run) -> Sentence:
    """Runs a command that fails with `code`; gives the one sentence that it says."""

    def run_command(code: int, *arguments: object) -> str:
        found, output, said = run(*arguments)
        assert (found, output) == (code, "")
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert "unexpected" not in said
        return said

    return run_command


@pytest.fixture
def file(tmp_path: Path, run_json: RunJson, model: Path) -> Path:
    """A context with PROMPT, made on pages of 64."""
    path = tmp_path / "base.llamayctx"
    run_json("ctx", "build", "-m", model, "-o", path, "-p", PROMPT, "--page-tokens", "64")
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    return path


def damaged_copy(path: Path, offset: int) -> Path:
    """A copy with one bit of a byte flipped."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    copy = path.with_suffix(".damaged")
    copy.write_bytes(data)
    return copy


# The way of a context.


@pytest.mark.parametrize(
    "command",
    [
        ("ctx", "build", "-p", "text", "-o", "{new}"),
        ("ctx", "fork", "-i", "{file}"),
        ("ctx", "resume", "-i", "{file}", "--max-tokens", "1"),
        ("generate", "--session", "new", "-p", "text", "--max-tokens", "1"),
    ],
)
def test_the_model_is_hashed_while_it_is_opened(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    file: Path,
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    """With a bar, and not in the time that a restore is said to take."""
    told: list[tuple[str, int, int | None]] = []
    shown = list[bool]()

    @contextmanager
    def bar() -> Iterator[Progress]:
        yield lambda label, done, total: told.append((label, done, total))
        shown.append(bool(told))

    monkeypatch.setattr("llamay.cli.options.progress_bar", bar)
    os.utime(model)  # so that it is hashed again
    arguments = [argument.format(file=file, new=tmp_path / "new") for argument in command]
    code, _, said = run(*arguments, "-m", model)
    assert code == 0, said
    assert shown == [True]
    size = model.stat().st_size
    assert told == [("hashing tiny.gguf", size, size)]


def test_build_show_fork_and_resume(run_json: RunJson, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "base.llamayctx"
    built = run_json("ctx", "build", "-m", model, "-o", path, "-p", PROMPT)
    prompt_ids = run_json("generate", "-m", model, "-p", PROMPT, *ANSWER)["prompt_ids"]
    assert (built["path"], built["tokens"]) == (str(path), len(prompt_ids))
    assert built["bytes"] == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    shown = run_json("ctx", "show", path)
    assert shown["version"] == 3
    assert shown["architecture"] == "llama"
    assert shown["weights_sha256"] == weights_digest(model)
    assert len(shown["layout_sha256"]) == 64
    assert (shown["tokens"], shown["precision"]) == (len(prompt_ids), "f32")
    assert (shown["owner"], shown["marking"]) == ("", "")
    assert (shown["logits"], shown["encrypted"]) == (True, False)
    assert [(row["check"], row["result"]) for row in shown["checks"]] == [
        ("header", "pass"),
        ("digests", "pass"),
    ]

    forked = run_json("ctx", "fork", "-m", model, "-i", path, "-n", 5, "--page-tokens", 16)
    assert (forked["source"], forked["tokens"]) == (str(path), len(prompt_ids))
    pages = -(-len(prompt_ids) // 16)
    # 2 layers, keys and values of 2 heads of 16 floats.
    page_bytes = 16 * 2 * 2 * 2 * 16 * 4
    assert (forked["pages"], forked["branches"]) == (pages, 5)
    assert (forked["pages_allocated"], forked["pages_a_copy_would_need"]) == (0, 5 * pages)
    assert forked["memory_bytes"] == pages * page_bytes
    assert forked["copy_memory_bytes"] == 6 * pages * page_bytes
    assert forked["seconds"] > 0

    resumed = run_json("ctx", "resume", "-m", model, "-i", path, *ANSWER)
    assert (resumed["model"], resumed["cached_tokens"]) == (str(model), len(prompt_ids))
    (choice,) = resumed["choices"]
    assert choice.keys() == {"ids", "text", "logprobs", "finish_reason"}
    assert (len(choice["ids"]), len(choice["logprobs"])) == (40, 40)
    assert choice["finish_reason"] == "length"
    assert resumed["timings"]["decode_tokens"] == 40


@pytest.mark.parametrize("kv", [precision.value for precision in KVPrecision])
@pytest.mark.parametrize(
    ("built", "resumed"),
    [
        (["--page-tokens", 64, "--threads", 2], ["--page-tokens", 16, "--threads", 1]),
        (["--page-tokens", 16, "--threads", 1], ["--page-tokens", 128, "--threads", 3]),
    ],
)
def test_resumed_on_other_pages_and_threads_it_goes_on_as_if_never_stopped(
    run_json: RunJson,
    run: Run,
    model: Path,
    tmp_path: Path,
    kv: str,
    built: list[object],
    resumed: list[object],
) -> None:
    path = tmp_path / "x.llamayctx"
    options = ("-m", model, "--kv", kv)
    run_json("ctx", "build", *options, *built, "-o", path, "-p", PROMPT)
    (expected,) = run_json("generate", *options, *built, "-p", PROMPT, *ANSWER)["choices"]
    found = run_json("ctx", "resume", *options, *resumed, "-i", path, *ANSWER)["choices"]
    assert found == [expected]
    code, output, said = run("ctx", "resume", *options, *resumed, "-i", path, *ANSWER)
    assert code == 0
    assert said.startswith("resumed ")
    assert said.count("\n") == 1
    _, generated, _ = run("generate", *options, *built, "-p", PROMPT, *ANSWER)
    assert output == generated


@pytest.mark.parametrize("kv", ["f32", "q8"])
def test_text_can_be_appended_before_going_on(
    run_json: RunJson, model: Path, tmp_path: Path, kv: str
) -> None:
    path = tmp_path / "x.llamayctx"
    options = ("-m", model, "--kv", kv)
    # The cut is where tokens end too: the words join none.
    first, rest = "0123456789" * 7, "!!" * 50
    run_json("ctx", "build", *options, "-o", path, "-p", first)
    expected = run_json("generate", *options, "-p", first + rest, *ANSWER)
    assert len(expected["prompt_ids"]) == 170
    found = run_json(
        "ctx", "resume", *options, "-i", path, "-p", rest, "--page-tokens", 16, *ANSWER
    )
    assert found["cached_tokens"] == 70
    assert found["choices"] == expected["choices"]


def test_text_appended_gets_no_space_before_it(run_json: RunJson, tmp_path: Path) -> None:
    """A SentencePiece tokenizer puts one before a text's beginning, and this is none."""
    path, model = tmp_path / "x.llamayctx", tmp_path / "spm.gguf"
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijk"]
    metadata = tiny_metadata(TinyConfig()) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        # Unknown, control, byte and normal tokens.
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * 12, np.int32),
        "tokenizer.ggml.scores": np.arange(0, -len(tokens), -1, dtype=np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    for name in ("tokenizer.ggml.pre", "tokenizer.ggml.merges"):
        del metadata[name]
    write_gguf(model, metadata, tiny_tensors(TinyConfig()))
    expected = run_json("generate", "-m", model, "-p", "abcdef", *ANSWER)
    assert [tokens[token] for token in expected["prompt_ids"]] == ["<s>", *"▁abcdef"]
    run_json("ctx", "build", "-m", model, "-o", path, "-p", "abc")
    found = run_json("ctx", "resume", "-m", model, "-i", path, "-p", "def", *ANSWER)
    assert found["cached_tokens"] == 5
    assert found["choices"] == expected["choices"]


def test_qwen2_resumes_too(run_json: RunJson, tmp_path: Path) -> None:
    path, model = tmp_path / "x.llamayctx", tmp_path / "qwen2.gguf"
    write_tiny_model(model, TinyConfig(arch="qwen2", tied=True))
    run_json("ctx", "build", "-m", model, "-o", path, "-p", PROMPT)
    expected = run_json("generate", "-m", model, "-p", PROMPT, *ANSWER)["choices"]
    found = run_json("ctx", "resume", "-m", model, "-i", path, "--page-tokens", 16, *ANSWER)
    assert found["choices"] == expected


def test_an_empty_prompt_is_the_token_that_begins_a_text(
    run_json: RunJson, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.llamayctx"
    assert run_json("ctx", "build", "-m", model, "-o", path, "-p", "")["tokens"] == 1
    expected = run_json("generate", "-m", model, "-p", "", *ANSWER)["choices"]
    for more in ([], ["-p", ""]):
        assert run_json("ctx", "resume", "-m", model, "-i", path, *more, *ANSWER)["choices"] == (
            expected
        )


def test_without_a_token_that_begins_a_text_there_is_nothing_to_build(
    sentence: Sentence, tmp_path: Path
) -> None:
    model = tmp_path / "no-bos.gguf"
    metadata = tiny_metadata(TinyConfig())
    del metadata["tokenizer.ggml.bos_token_id"]
    write_gguf(model, metadata, tiny_tensors(TinyConfig()))
    said = sentence(2, "ctx", "build", "-m", model, "-o", tmp_path / "x", "-p", "")
    assert said == "error: prompt: expected some text, found none\n"
    assert not (tmp_path / "x").exists()


def test_a_context_without_tokens_cannot_go_on(
    sentence: Sentence, model: Path, tmp_path: Path
) -> None:
    path, engine = tmp_path / "x.llamayctx", Engine.load(str(model))
    write_snapshot(engine.cache.new_context(), path, engine.model.identity())
    for command in ("fork", "resume"):
        said = sentence(2, "ctx", command, "-m", model, "-i", path)
        assert said == f"error: {path}: expected a context with tokens, found an empty one\n"


def test_a_context_without_logits_computes_them_again(
    run_json: RunJson, model: Path, tmp_path: Path
) -> None:
    path, engine = tmp_path / "x.llamayctx", Engine.load(str(model))
    branch = engine.prefill(PROMPT)
    write_snapshot(branch.context, path, engine.model.identity(), logits=False)
    assert run_json("ctx", "show", path)["logits"] is False
    expected = run_json("generate", "-m", model, "-p", PROMPT, *ANSWER)["choices"]
    assert run_json("ctx", "resume", "-m", model, "-i", path, *ANSWER)["choices"] == expected


def test_a_context_that_is_full_is_told(
    run: Run, sentence: Sentence, model: Path, file: Path
) -> None:
    size = Engine.load(str(model)).model.encode_prompt(PROMPT)
    options = ("-m", model, "-i", file, "--ctx-size", len(size) + 3)
    code, output, said = run("ctx", "resume", *options, "--json", *ANSWER)
    assert code == 0
    assert len(json.loads(output)["choices"][0]["ids"]) == 3
    assert f"the context of {len(size) + 3} tokens is full" in said
    code, output, said = run("ctx", "resume", *options, "-p", "12345", *ANSWER)
    assert (code, output) == (1, "")
    assert f"the context holds {len(size) + 3} tokens, and {len(size) + 5} are needed" in said
    small = ("--ctx-mem-budget", "20K", "--page-tokens", 16)
    said = sentence(1, "ctx", "resume", "-m", model, "-i", file, *small)
    assert "holds 2 pages of 8192 bytes, 2 of them are left, and 5 are needed" in said


# Models that are not the one.


def changed(model: Path, path: Path, tensor: str) -> Path:
    """A model that differs in one bit of one weight."""
    data = bytearray(model.read_bytes())
    weights = tiny_tensors(TinyConfig())[tensor].data
    (offset,) = [data.find(weights)]
    assert offset > 0
    data[offset + 100] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "output_norm.weight"])
def test_other_weights_of_the_same_layout_are_refused(
    sentence: Sentence, run: Run, model: Path, file: Path, tmp_path: Path, tensor: str
) -> None:
    other = changed(model, tmp_path / "other.gguf", tensor)
    digests = weights_digest(model), weights_digest(other)
    assert digests[0] != digests[1]
    for command in ("resume", "fork"):
        said = sentence(1, "ctx", command, "-m", other, "-i", file)
        assert said.startswith(f"error: {file}: expected a snapshot of weights {digests[1]}, ")
        assert f"found one of {digests[0]};" in said
    assert run("ctx", "fork", "-m", model, "-i", file)[0] == 0


@pytest.mark.parametrize(
    ("config", "differs"),
    [
        (TinyConfig(layers=3), "expected layers 3, found 2"),
        (TinyConfig(kv_heads=4), "expected KV heads 4, found 2"),
        (TinyConfig(head_dim=32), "expected head size 32, found 16"),
        (TinyConfig(arch="qwen2"), "expected architecture qwen2, found llama"),
        (TinyConfig(ffn=128), "expected layout digest "),
    ],
)
def test_another_layout_is_refused(
    sentence: Sentence, file: Path, tmp_path: Path, config: TinyConfig, differs: str
) -> None:
    other = tmp_path / "other.gguf"
    write_tiny_model(other, config)
    said = sentence(1, "ctx", "resume", "-m", other, "-i", file)
    assert "the snapshot is of another kind of model" in said
    assert differs in said


# Precisions.


def test_what_lost_bits_says_so_and_is_never_matched(
    run: Run, run_json: RunJson, model: Path, file: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small.llamayctx"
    saved = run_json("ctx", "convert", file, "-o", small, "--kv", "q8")
    assert saved["path"] == str(small)
    assert saved["bytes"] == small.stat().st_size < file.stat().st_size / 2
    assert saved["seconds"] > 0
    shown = run_json("ctx", "show", small)
    assert shown["precision"] == "q8"
    assert shown["numerics"] != run_json("ctx", "show", file)["numerics"]
    back = tmp_path / "back.llamayctx"
    run_json("ctx", "convert", small, "-o", back, "--kv", "f32")
    for path in (small, back):
        code, output, said = run("ctx", "resume", "-m", model, "-i", path, *ANSWER, "--json")
        assert code == 0
        assert f"{path}: continues, not bit-exact (" in said
        assert len(json.loads(output)["choices"][0]["ids"]) == 40
        engine = Engine.load(str(model))
        restored = read_snapshot(engine.cache, path, engine.model.identity())
        engine.cache.retain(restored.context)
        assert engine.cache.match(restored.context.tokens).length == 0
    engine = Engine.load(str(model))
    exact = read_snapshot(engine.cache, file, engine.model.identity())
    engine.cache.retain(exact.context)
    assert engine.cache.match(exact.context.tokens).length == exact.context.length


def test_a_payload_in_the_cache_s_own_precision_loses_nothing(
    run: Run, run_json: RunJson, model: Path, tmp_path: Path
) -> None:
    path, small = tmp_path / "x.llamayctx", tmp_path / "small.llamayctx"
    run_json("ctx", "build", "-m", model, "--kv", "q8", "-o", path, "-p", PROMPT)
    run_json("ctx", "convert", path, "-o", small, "--kv", "q8")
    options = ("-m", model, "--kv", "q8", *ANSWER)
    expected = run_json("generate", *options, "-p", PROMPT)["choices"]
    code, output, said = run("ctx", "resume", *options, "-i", small, "--json")
    assert code == 0
    assert json.loads(output)["choices"] == expected
    assert "not bit-exact" not in said
    # Other kernels' numbers continue as well, but not to the bit.
    _, _, said = run("ctx", "resume", "-m", model, "-i", small, "--kv", "f32", *ANSWER)
    assert f"{small}: continues, not bit-exact (" in said


def test_converting_a_file_onto_itself(run_json: RunJson, file: Path) -> None:
    before = run_json("ctx", "show", file)
    run_json("ctx", "convert", file, "-o", file, "--kv", "f16")
    after = run_json("ctx", "show", file)
    assert after["precision"] == "f16"
    assert after["bytes"] < before["bytes"]
    assert {row["result"] for row in after["checks"]} == {"pass"}
    assert after["tokens"] == before["tokens"]


# What is shown.


def stored_header(path: Path) -> dict[str, Any]:
    """The version and the header's fields, as the file has them."""
    data = path.read_bytes()
    fields = json.loads(data[16 : 16 + int.from_bytes(data[12:16], "little")])
    assert isinstance(fields, dict)
    return {"version": int.from_bytes(data[8:10], "little"), **fields}


@pytest.mark.parametrize("name", ["v2-f16", "v3-q8", "v3-key", "v3-passphrase"])
def test_every_field_of_the_header_is_shown(run: Run, run_json: RunJson, name: str) -> None:
    path = GOLDEN / f"{name}.llamayctx"
    stored, shown = stored_header(path), run_json("ctx", "show", path)
    stored["logits"] = stored["logits"] > 0
    assert len(stored) > 15
    assert {field: shown[field] for field in stored} == stored
    assert (shown["start"], shown["parent"]) == (0, "")
    lines = run("ctx", "show", path)[1].splitlines()
    assert [line.partition("   ")[0].rstrip() for line in lines[: len(shown) - 1]] == [
        field.replace("_", " ") for field in shown if field != "checks"
    ]


def test_a_segment_s_place_is_shown(
    run: Run, run_json: RunJson, sentence: Sentence, model: Path, tmp_path: Path
) -> None:
    path, engine = tmp_path / "x.llamayctx", Engine.load(str(model))
    branch = engine.prefill(range(3, 10))
    write_segment(path, engine.model.identity(), branch.context, 4, 7, parent="a\x1bb")
    stored, shown = stored_header(path), run_json("ctx", "show", path)
    assert (stored["version"], shown["version"]) == (4, 4)
    assert (shown["start"], shown["tokens"], shown["parent"]) == (4, 3, "a\x1bb")
    assert {field: shown[field] for field in stored} == {**stored, "logits": shown["logits"]}
    output = run("ctx", "show", path)[1]
    assert "\nstart             4\n" in output
    assert "\nparent            a\\x1bb\n" in output
    said = sentence(1, "ctx", "resume", "-m", model, "-i", path)
    assert "found a segment from position 4 on" in said


# Keys.


def test_an_encrypted_context_needs_its_key(
    run: Run, run_json: RunJson, sentence: Sentence, model: Path, tmp_path: Path, key: Path
) -> None:
    path, wrong = tmp_path / "x.llamayctx", tmp_path / "wrong"
    wrong.write_bytes(bytes(32))
    run_json("ctx", "build", "-m", model, "-o", path, "-p", PROMPT, "--context-key", key)
    expected = run_json("generate", "-m", model, "-p", PROMPT, *ANSWER)["choices"]
    resume = ("ctx", "resume", "-m", model, "-i", path, *ANSWER)
    assert run_json(*resume, "--context-key", key)["choices"] == expected
    fork = ("ctx", "fork", "-m", model, "-i", path)
    assert run_json(*fork, "--context-key", key)["pages_allocated"] == 0
    convert = ("ctx", "convert", path, "-o", tmp_path / "y")
    for command in (resume, fork, convert):
        assert f"error: {path}: the snapshot is encrypted; give its key file" in sentence(
            1, *command
        )
        said = sentence(1, *command, "--context-key", wrong)
        assert "encrypted with another key file than the one given" in said
    assert not (tmp_path / "y").exists()
    with_key = run_json("ctx", "show", path, "--context-key", key)
    without = run_json("ctx", "show", path)
    assert with_key["encrypted"] is without["encrypted"] is True
    assert [row["result"] for row in with_key["checks"]] == ["pass", "pass", "pass"]
    assert [row["result"] for row in without["checks"]] == ["pass", "pass", "note"]
    assert "another key file" in sentence(1, "ctx", "show", path, "--context-key", wrong)


def test_encryption_is_put_on_and_taken_off(
    run: Run,
    run_json: RunJson,
    sentence: Sentence,
    model: Path,
    file: Path,
    tmp_path: Path,
    key: Path,
) -> None:
    secret, other, plain = tmp_path / "secret", tmp_path / "other", tmp_path / "plain"
    new_key = tmp_path / "new key"
    new_key.write_bytes(os.urandom(32))
    run_json("ctx", "convert", file, "-o", secret, "--output-key", key)
    run_json("ctx", "convert", secret, "-o", other, "--context-key", key, "--output-key", new_key)
    code, _, said = run("ctx", "convert", other, "-o", plain, "--context-key", new_key)
    assert (code, said) == (0, f"{plain}: not encrypted; --output-key FILE encrypts it\n")
    assert plain.read_bytes() == file.read_bytes()
    said = sentence(1, "ctx", "show", other, "--context-key", key)
    assert "encrypted with another key file" in said
    for command in (
        ("resume", "-m", model, "-i", file),
        ("show", file),
        ("convert", file, "-o", file),
    ):
        said = sentence(1, "ctx", *command, "--context-key", key)
        assert "the snapshot is not encrypted, and a key was given; leave it out" in said


@pytest.mark.parametrize(("size", "found"), [(31, "31"), (33, "more than 32"), (None, "")])
def test_a_key_file_holds_32_bytes(
    sentence: Sentence, model: Path, tmp_path: Path, size: int | None, found: str
) -> None:
    path = tmp_path / "k"
    if size:
        path.write_bytes(bytes(size))
    target = tmp_path / "x.llamayctx"
    options = ("-m", model, "-o", target, "-p", PROMPT)
    said = sentence(1, "ctx", "build", *options, "--context-key", path)
    if size:
        assert f"{path}: expected a key of 32 bytes, found {found};" in said
    else:
        assert f"{path}: the key cannot be read (No such file or directory)" in said
    assert not target.exists()


# Files that cannot be used.


@pytest.mark.parametrize("place", [3, 9, 40, 0.3, 0.6, 0.9, -1])
def test_damage_is_found(
    run: Run, sentence: Sentence, model: Path, file: Path, tmp_path: Path, place: float
) -> None:
    size = file.stat().st_size
    copy = damaged_copy(file, int(place * size) if isinstance(place, float) else int(place))
    said = sentence(1, "ctx", "resume", "-m", model, "-i", copy)
    assert said.startswith(f"error: {copy}: ")
    assert sentence(1, "ctx", "convert", copy, "-o", tmp_path / "y") == said
    assert not (tmp_path / "y").exists()
    code, output, said = run("ctx", "show", copy, "--json")
    assert code == 1
    if isinstance(place, float):
        failed = [row for row in json.loads(output)["checks"] if row["result"] == "fail"]
        assert [row["check"] for row in failed] == ["digests"]
        assert said == ""
        code, output, said = run("ctx", "show", copy)
        assert (code, said) == (1, "")
        assert "fail: " in output
    else:
        assert output == ""
        assert said.count("\n") == 1


def test_what_is_cut_off_or_too_long_is_refused(
    sentence: Sentence, model: Path, file: Path, tmp_path: Path
) -> None:
    data, copy = file.read_bytes(), tmp_path / "copy"
    for size in (0, 8, 15, 16, 300, len(data) // 2, len(data) - 1, len(data) + 1):
        copy.write_bytes((data + b"\0")[:size])
        for command in (("resume", "-m", model, "-i", copy), ("show", copy)):
            assert sentence(1, "ctx", *command).startswith(f"error: {copy}: ")


def test_a_newer_version_asks_for_a_newer_llamay(
    sentence: Sentence, model: Path, file: Path
) -> None:
    data = bytearray(file.read_bytes())
    data[8] = data[10] = 5
    file.write_bytes(data)
    for command in (("resume", "-m", model, "-i", file), ("show", file)):
        said = sentence(1, "ctx", *command)
        assert "needs a reader of version 5" in said
        assert "update llamay" in said


def test_what_is_no_file_is_refused(
    sentence: Sentence, model: Path, tmp_path: Path, file: Path
) -> None:
    for path, reason in (
        (tmp_path / "missing", "the snapshot cannot be read (No such file or directory)"),
        (file / "below", "the snapshot cannot be read (Not a directory)"),
        (tmp_path, "expected a snapshot file, found something else"),
        (model, "expected a snapshot, which begins with LLAMAYCX"),
    ):
        for command in (
            ("resume", "-m", model, "-i", path),
            ("fork", "-m", model, "-i", path),
            ("show", path),
            ("convert", path, "-o", tmp_path / "y"),
        ):
            assert sentence(1, "ctx", *command).startswith(f"error: {path}: {reason}")


def test_where_nothing_can_be_written(
    sentence: Sentence, model: Path, tmp_path: Path, file: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "kept").touch()
    for target in (folder, file / "below"):
        for command in (("build", "-m", model, "-p", "a"), ("convert", file)):
            said = sentence(1, "ctx", *command, "-o", target)
            assert said.startswith(f"error: {target}: cannot be written (")
    assert [path.name for path in folder.iterdir()] == ["kept"]
    assert not list(tmp_path.glob(".llamay-*"))


def test_a_folder_without_permission(
    sentence: Sentence, tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def open_(path: Any, flags: int, *mode: int) -> int:
        """Refuses to create files: root, as whom tests may run, is never refused."""
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_)
    target = tmp_path / "folder" / "x"
    said = sentence(1, "ctx", "convert", file, "-o", target)
    assert said.startswith(f"error: {target}: cannot be written (Permission denied); ")


def test_an_existing_file_is_replaced_whole(
    run_json: RunJson, sentence: Sentence, model: Path, tmp_path: Path, key: Path
) -> None:
    path = tmp_path / "x.llamayctx"
    path.write_bytes(b"y" * 10**6)
    built = run_json("ctx", "build", "-m", model, "-o", path, "-p", "0")
    assert path.stat().st_size == built["bytes"] < 10**5
    assert {row["result"] for row in run_json("ctx", "show", path)["checks"]} == {"pass"}
    before = path.read_bytes()
    sentence(1, "ctx", "convert", path, "-o", path, "--context-key", key)
    sentence(1, "ctx", "build", "-m", model, "-o", path, "-p", PROMPT, "--ctx-size", "2")
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "key", "x.llamayctx"]


# Version 2.


@pytest.mark.parametrize("kv", ["f32", "f16", "vq8", "q8"])
def test_a_version_2_file_is_shown(run_json: RunJson, kv: str) -> None:
    shown = run_json("ctx", "show", GOLDEN / f"v2-{kv}.llamayctx")
    assert (shown["version"], shown["precision"], shown["tokens"]) == (2, kv, 21)
    assert shown["weights_sha256"] is None
    assert (shown["owner"], shown["marking"]) == ("ada", "internal")
    assert [(row["check"], row["result"]) for row in shown["checks"]] == [
        ("header", "pass"),
        ("digests", "note"),
    ]


def test_a_version_2_file_is_restored_by_layout_with_a_warning(
    run: Run, run_json: RunJson, sentence: Sentence, model: Path, file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "old.llamayctx"
    path.write_bytes(as_version_2(file.read_bytes()))
    expected = run_json("generate", "-m", model, "-p", PROMPT, *ANSWER)["choices"]
    code, output, said = run("ctx", "resume", "-m", model, "-i", path, *ANSWER, "--json")
    assert code == 0
    assert json.loads(output)["choices"] == expected
    assert f"{path}: version 2 does not say which weights made it" in said
    code, output, said = run("ctx", "fork", "-m", model, "-i", path, "--json")
    assert (code, json.loads(output)["pages_allocated"]) == (0, 0)
    assert f"{path}: version 2 does not say which weights made it" in said
    said = sentence(1, "ctx", "convert", path, "-o", tmp_path / "y")
    assert "version 2 does not say which weights made it" in said


# What is printed.


def test_without_json_a_person_can_read_it(
    run: Run, model: Path, tmp_path: Path, file: Path
) -> None:
    path = tmp_path / "new\x1b[2J.llamayctx"
    code, output, said = run("ctx", "build", "-m", model, "-o", path, "-p", "0123456789")
    assert (code, said) == (0, "")
    prefilled, saved = output.splitlines()
    assert prefilled.startswith("prefilled 10 tokens in ")
    assert saved.startswith(f"saved {tmp_path}/new\\x1b[2J.llamayctx (")
    code, output, _ = run("ctx", "convert", path, "-o", path)
    assert code == 0
    assert "\x1b" not in output
    code, output, said = run("ctx", "fork", "-m", model, "-i", path, "-n", 3)
    assert (code, said) == (0, "")
    lines = {line[:23].strip(): line[26:] for line in output.splitlines()}
    assert lines["source"] == f"{tmp_path}/new\\x1b[2J.llamayctx, 10 tokens, 1 pages"
    assert lines["branches"].startswith("3 in ")
    assert lines["pages allocated"] == "0"
    assert lines["pages a copy would need"] == "3"
    # A page of 64 positions takes 32,768 bytes.
    assert lines["memory held"] == "32.8 kB (copies would hold 131.1 kB)"
    code, output, said = run("ctx", "show", file)
    assert (code, said) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in output.splitlines() if line.startswith("prec"))
    assert shown == {"precision": "f32"}
    assert "\ncache precision   f32\n" in output
    assert output.splitlines()[-1].startswith("digests   pass: ")


def test_a_file_s_texts_cannot_command_the_terminal(run: Run, model: Path, tmp_path: Path) -> None:
    path, engine = tmp_path / "x.llamayctx", Engine.load(str(model))
    branch = engine.prefill([3])
    identity = replace(engine.model.identity(), architecture="\x1b[2J")
    write_snapshot(branch.context, path, identity, owner="\x07\u202e", marking="a\nb")
    for arguments in (["ctx", "show", path], ["ctx", "resume", "-m", model, "-i", path]):
        _, output, said = run(*arguments)
        assert not {"\x1b", "\x07", "\u202e"} & {*output, *said}
    assert "a\\nb" in run("ctx", "show", path)[1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["ctx", "build", "-p", "a"],
        ["ctx", "resume"],
        ["ctx", "fork", "-n", "0", "-i", "x"],
        ["ctx", "show"],
        ["ctx", "convert", "x"],
        ["ctx", "convert", "x", "-o", "y", "--kv", "q4"],
        ["ctx", "build", "-o", "x", "-p", "a", "--page-tokens", "17"],
        ["ctx", "resume", "-i", "x", "--temperature", "-1"],
        ["ctx", "drop", "x"],
        ["ctx", "build", "-o", "x", "--file", "missing"],
    ],
)
def test_wrong_use_exits_with_2(
    sentence: Sentence,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["-m", model] if {"build", "resume", "fork"} & {*arguments} else []
    sentence(2, *arguments, *given)
    assert not (tmp_path / "x").exists()


@pytest.mark.model
def test_the_default_model_goes_on_as_if_never_stopped(
    run_json: RunJson, default_model_path: Path, tmp_path: Path
) -> None:
    path, options = tmp_path / "x.llamayctx", ("-m", default_model_path)
    answer = ("--max-tokens", "8", "--seed", "5")
    run_json("ctx", "build", *options, "-o", path, "-p", PROMPT, "--threads", 2)
    expected = run_json("generate", *options, "-p", PROMPT, *answer)["choices"]
    other = ("--page-tokens", 16, "--threads", 1)
    found = run_json("ctx", "resume", *options, *other, "-i", path, *answer)
    assert found["choices"] == expected
