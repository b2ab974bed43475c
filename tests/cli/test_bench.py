import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llamay import cli
from llamay.kv import Context
from tests.gguf_writer import write_gguf
from tests.tiny_models import TinyConfig, tiny_metadata, tiny_tensors, write_tiny_model

Run = Callable[..., tuple[int, str, str]]

SHORT = ("--prompt", "70", "--gen", "3", "--forks", "5", "--batch", "1,3", "--reps", "2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_tiny_model(path, TinyConfig(context_length=512))
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], empty_home: Path) -> Run:
    """Runs `llamay bench` with arguments; gives its code, stdout and stderr."""

    def run_bench(model: Path, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["bench", "-m", str(model), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_bench


def test_json(run: Run, tiny: Path) -> None:
    code, output, said = run(tiny, *SHORT, "--page-tokens", "16", "--threads", "2", "--json")
    assert (code, said) == (0, "")
    result = json.loads(output)
    header = result["header"]
    assert header.keys() >= {"version", "model", "threads", "kernels", "kv", "weights_bytes"}
    assert (header["model"], header["threads"], header["kv"]) == ("tiny llama", 2, "f32")
    assert header["kernels"].startswith("cpu ")
    weights = sum(len(tensor.data) for tensor in tiny_tensors(TinyConfig()).values())
    assert header["weights_bytes"] == weights
    for phase, tokens in (("prefill", 70), ("decode", 3)):
        figures = result[phase]
        assert figures["tokens"] == tokens
        assert figures["tokens_per_s"] == pytest.approx(tokens / figures["seconds"])
    assert [row["branches"] for row in result["batch"]] == [1, 3]
    assert all(row["tokens_per_s"] > 0 for row in result["batch"])
    fork = result["fork"]
    assert fork["seconds"] > 0
    # 70 tokens in pages of 16.
    assert (fork["count"], fork["pages_allocated"], fork["pages_a_copy_would_need"]) == (5, 0, 25)
    # 2 layers, keys and values of 2 heads of 16 floats, and 271 logits.
    payload = 70 * 2 * 2 * 2 * 16 * 4 + 271 * 4 + 70 * 4
    for phase in ("snapshot", "restore"):
        assert result[phase]["seconds"] > 0
        assert payload < result[phase]["bytes"] < payload + 2048
    assert result["restore"]["to_logits_seconds"] >= result["restore"]["seconds"]
    assert result["restore"]["query_row_seconds"] > 0
    assert result["restore_speedup"] == pytest.approx(
        result["prefill"]["seconds"] / result["restore"]["to_logits_seconds"]
    )


def test_pages_that_a_fork_takes_are_counted(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Context.fork

    def fork(self: Context) -> Context:
        child = real(self)
        child.reserve(1)
        return child

    monkeypatch.setattr(Context, "fork", fork)
    _, output, _ = run(tiny, *SHORT, "--json")
    assert json.loads(output)["fork"]["pages_allocated"] == 5


def test_the_table(run: Run, tiny: Path) -> None:
    code, output, said = run(tiny, *SHORT, "--kv", "q8")
    assert (code, said) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("version ")
    assert " · model tiny llama · " in lines[0]
    assert " · kv q8 · " in lines[0]
    assert [line.split("  ")[0] for line in lines[2:10]] == [
        "phase",
        "prefill",
        "decode",
        "1 branches",
        "3 branches",
        "fork x5",
        "snapshot",
        "restore",
    ]
    assert "0 pages allocated (a copy would be 10)" in output
    assert lines[-1].startswith("Restoring 70 tokens is ")


def test_a_model_s_name_cannot_command_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    metadata = tiny_metadata(TinyConfig()) | {"general.name": "x\x1b[2J\ny"}
    write_gguf(path, metadata, tiny_tensors(TinyConfig()))
    code, output, _ = run(path, *SHORT)
    assert code == 0
    assert "model x\\x1b[2J\\ny · " in output
    assert "\x1b" not in output


def test_more_branches_than_the_vocabulary_has_tokens(run: Run, tiny: Path) -> None:
    options = ("--prompt", "1", "--gen", "1", "--forks", "1", "--reps", "1")
    code, output, said = run(tiny, *options, "--batch", "272", "--json")
    assert (code, said) == (0, "")
    assert json.loads(output)["batch"][0]["branches"] == 272


def test_the_whole_context_can_be_used(run: Run, tiny: Path) -> None:
    options = ("--gen", "3", "--forks", "1", "--reps", "1", "--batch", "1", "--ctx-size", "70")
    assert run(tiny, "--prompt", "67", *options)[0] == 0
    code, output, said = run(tiny, "--prompt", "68", *options)
    assert (code, output) == (2, "")
    assert said == "error: prompt and gen: expected up to 70 tokens together, found 68 + 3\n"


@pytest.mark.parametrize("batch", ["0", "1,0", "", "a", "1,,2", "-1", "1025", "1.5"])
def test_batches_are_counts(run: Run, tiny: Path, batch: str) -> None:
    code, output, said = run(tiny, "--batch", batch)
    assert (code, output) == (2, "")
    assert said == f"error: batch: expected counts from 1 to 1024 such as 1,2,4, found {batch!r}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--prompt", "0"], 2, "error: Invalid value for '--prompt': 0 is not in the range"),
        (["--gen", "0"], 2, "error: Invalid value for '--gen': 0 is not in the range"),
        (["--forks", "0"], 2, "error: Invalid value for '--forks': 0 is not in the range"),
        (["--reps", "0"], 2, "error: Invalid value for '--reps': 0 is not in the range"),
        ([], 2, "error: prompt and gen: expected up to 512 tokens together, found 2048 + 32"),
        ([*SHORT, "--ctx-mem-budget", "64K"], 1, "error: the context memory budget holds 2 pages"),
    ],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(
    run: Run, tiny: Path, arguments: list[str], code: int, expected: str
) -> None:
    found, output, said = run(tiny, *arguments, "--json")
    assert (found, output) == (code, "")
    assert said.startswith(expected)
    assert said.count("\n") == 1


@pytest.mark.model
def test_the_default_model_s_forks_take_no_page(run: Run, default_model_path: Path) -> None:
    options = ("--prompt", "65", "--gen", "2", "--forks", "32", "--batch", "2", "--reps", "1")
    code, output, _ = run(default_model_path, *options, "--json")
    assert code == 0
    fork = json.loads(output)["fork"]
    assert (fork["pages_allocated"], fork["pages_a_copy_would_need"]) == (0, 64)
