import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamay import cli
from llamay.cli.output import terminal_text
from llamay.sampling import child_seed
from tests.gguf_writer import float_tensor, write_gguf
from tests.scripted_model import byte_ids, write_endless_model, write_scripted_model
from tests.tiny_models import (
    CONTROL_TOKENS,
    VOCAB,
    TinyConfig,
    tiny_metadata,
    tiny_tensors,
)

LLAMAY = [sys.executable, "-m", "llamay"]
ANSWER = "Fine, dé€p!"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that says ANSWER after a line's end, and counts without end after a zero."""
    path = tmp_path / "scripted.gguf"
    write_scripted_model(path, byte_ids(f"\n{ANSWER}".encode()), byte_ids(b"01234567890"))
    return path


@pytest.fixture
def wandering(tmp_path: Path) -> Path:
    """A model with random weights, whose answers do not end by themselves."""
    path = tmp_path / "tiny.gguf"
    write_endless_model(path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `llamay generate` with arguments; gives its code, stdout and stderr."""

    def generate(model: Path, *arguments: str) -> tuple[int, str, str]:
        code = cli.main(["generate", "-m", str(model), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return generate


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Puts bytes on standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def sentence(code: int, output: str, said: str) -> str:
    """The one sentence of a failure, without `error: `."""
    assert code in (1, 2)
    assert output == ""
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "unexpected" not in said
    return said.removeprefix("error: ")


# The prompt.


def test_a_prompt_is_continued(run: Run, model: Path) -> None:
    assert run(model, "-p", "How are you?\n") == (0, f"{ANSWER}\n", "")


def test_a_file_and_standard_input_are_prompts_too(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "prompt.txt"
    text.write_bytes("Grüße\n".encode())
    _, output, _ = run(model, "--file", str(text), "--json")
    assert json.loads(output)["prompt_ids"] == byte_ids("Grüße\n".encode())
    _, output, _ = run(model, "--file", str(text), "-p", "Go", "--json", "--max-tokens", "1")
    assert json.loads(output)["prompt_ids"] == byte_ids("Grüße\n\n\nGo".encode())
    give(monkeypatch, "Grüße\n".encode())
    _, output, _ = run(model, "--json")
    assert json.loads(output)["prompt_ids"] == byte_ids("Grüße\n".encode())


def spelled(ids: Sequence[int]) -> str:
    """The text of ids, control tokens in braces."""
    return "".join(
        f"{{{VOCAB[token]}}}" if token < len(CONTROL_TOKENS) else VOCAB[token] for token in ids
    ).replace("Ċ", "\n")


def test_chat_uses_the_template_and_system_implies_it(run: Run, model: Path) -> None:
    turn = "{<|im_start|>}user\nHi{<|im_end|>}\n{<|im_start|>}assistant\n"
    for arguments, before in (
        (["--chat"], ""),
        (["--system", "Be"], "{<|im_start|>}system\nBe{<|im_end|>}\n"),
        (["--system", ""], "{<|im_start|>}system\n{<|im_end|>}\n"),
    ):
        code, output, _ = run(model, "-p", "Hi", "--json", *arguments)
        assert code == 0
        result = json.loads(output)
        assert spelled(result["prompt_ids"]) == before + turn
        assert result["choices"][0]["text"] == ANSWER


def test_a_message_s_control_tokens_are_text(run: Run, model: Path) -> None:
    _, output, _ = run(model, "-p", "<|im_end|>", "--chat", "--json")
    ids = json.loads(output)["prompt_ids"]
    assert spelled(ids).startswith("{<|im_start|>}user\n<|im_end|>{<|im_end|>}\n")


def test_an_empty_prompt_starts_from_bos(run: Run, model: Path) -> None:
    code, output, _ = run(model, "-p", "", "--json")
    assert code == 0
    assert json.loads(output)["prompt_ids"] == [VOCAB.index("<|im_start|>")]


@pytest.mark.parametrize("data", [b"a\xff", b"\xe2\x82", b"\xed\xa0\x80"])
def test_what_is_not_utf_8_is_refused(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    path = tmp_path / "prompt\x1b.txt"
    path.write_bytes(data)
    said = sentence(*run(model, "--file", str(path)))
    assert "prompt\\x1b.txt: expected UTF-8 text; byte " in said
    give(monkeypatch, data)
    assert "standard input: expected UTF-8 text" in sentence(*run(model))


def test_a_file_that_cannot_be_read_is_refused(run: Run, model: Path, tmp_path: Path) -> None:
    assert "nothing.txt: cannot be read: No such file" in sentence(
        *run(model, "--file", str(tmp_path / "nothing.txt"))
    )
    assert "directory" in sentence(*run(model, "--file", str(tmp_path)))


def test_without_a_prompt_on_a_terminal_one_is_asked_for(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, b"")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, *rest = run(model)
    assert code == 2
    assert "expected -p TEXT, --file FILE" in sentence(code, *rest)


def test_a_prompt_beyond_the_context_is_refused_with_both_counts(run: Run, model: Path) -> None:
    code, *rest = run(model, "-p", "x" * 31, "--ctx-size", "30")
    assert code == 1
    said = sentence(code, *rest)
    assert "holds 30 tokens" in said
    assert "31 are needed" in said


def test_an_answer_to_the_end_of_the_context_says_so(run: Run, model: Path) -> None:
    code, output, said = run(model, "-p", "0", "--ctx-size", "30")
    assert code == 0
    assert output == "12345678901234567890123456789\n"
    assert "context of 30 tokens" in said
    _, output, _ = run(model, "-p", "0", "--ctx-size", "30", "--json")
    assert json.loads(output)["choices"][0]["finish_reason"] == "context"


# The output.


def test_json_is_one_object_with_the_promised_keys(run: Run, wandering: Path) -> None:
    arguments = ["-p", "One two", "--n", "2", "--max-tokens", "9", "--seed", "3", "--json"]
    code, output, said = run(wandering, *arguments)
    assert (code, said) == (0, "")
    result = json.loads(output)
    assert set(result) == {"model", "prompt_ids", "cached_tokens", "choices", "timings"}
    assert result["model"] == str(wandering)
    assert result["cached_tokens"] == 0
    assert len(result["choices"]) == 2
    for choice in result["choices"]:
        assert set(choice) == {"ids", "text", "logprobs", "finish_reason"}
        assert choice["finish_reason"] == "length"
        assert len(choice["ids"]) == len(choice["logprobs"]) == 9
        assert all(logprob < 0 and math.isfinite(logprob) for logprob in choice["logprobs"])
    timings = result["timings"]
    assert timings.pop("prefill_tokens") == len(result["prompt_ids"])
    assert timings.pop("decode_tokens") == 18
    assert set(timings) == {"open_s", "prefill_s", "decode_s"}
    assert all(0 < seconds < 60 for seconds in timings.values())


def test_json_and_plain_text_are_the_same_answer(run: Run, wandering: Path) -> None:
    arguments = ["-p", "One", "--seed", "5", "--max-tokens", "40"]
    text = json.loads(run(wandering, *arguments, "--json")[1])["choices"][0]["text"]
    assert len(text) > 20
    assert run(wandering, *arguments)[1] == f"{terminal_text(text)}\n"


def test_several_answers_come_one_after_the_other_under_their_seeds(run: Run, model: Path) -> None:
    code, output, said = run(model, "-p", "\n", "--n", "3", "--seed", "7")
    assert (code, said) == (0, "")
    seeds = [7, child_seed(7, 1), child_seed(7, 2)]
    assert output == "\n".join(
        f"── {number} · seed {seed} ──\n{ANSWER}\n" for number, seed in enumerate(seeds, 1)
    )


def test_the_first_of_several_is_the_only_one_and_each_comes_back_by_its_seed(
    run: Run, wandering: Path
) -> None:
    options = ["-p", "Once upon", "--json", "--max-tokens", "20", "--temperature", "1.5"]
    several = json.loads(run(wandering, *options, "--n", "4", "--seed", "11")[1])["choices"]
    assert len({tuple(choice["ids"]) for choice in several}) == 4
    for index, choice in enumerate(several):
        seed = str(child_seed(11, index))
        assert json.loads(run(wandering, *options, "--seed", seed)[1])["choices"] == [choice]


def test_threads_change_nothing(run: Run, wandering: Path) -> None:
    options = ["-p", "Once upon", "--json", "--max-tokens", "30", "--n", "2"]
    outputs = [run(wandering, *options, "--threads", str(threads))[1] for threads in (1, 2, 3)]
    choices = [json.loads(output)["choices"] for output in outputs]
    assert choices[0] == choices[1] == choices[2]


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    evil = "\nA\x1b[2J\x07\x9b\u202e\u2028\r\x7f\x00\tZ"
    write_scripted_model(path, byte_ids(evil.encode())[: evil.encode().index(b"\xe2\x80\xa8")])
    code, output, _ = run(path, "-p", "\n")
    assert code == 0
    assert output == "A\\x1b[2J\\x07\\x9b\\u202e\n"
    write_scripted_model(path, byte_ids(b"\nA\r\x7f\x00\tZ\xe2\x80\xa8"))
    assert run(path, "-p", "\n")[1] == "A\\r\\x7f\\x00\tZ\\u2028\n"
    code, output, _ = run(path, "-p", "\n", "--json")
    assert output.isascii()
    assert output.replace("\n", "").isprintable()
    assert json.loads(output)["choices"][0]["text"] == "A\r\x7f\x00\tZ\u2028"


def test_random_bytes_of_a_model_do_not_reach_the_terminal(run: Run, wandering: Path) -> None:
    flat = ["--temperature", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    arguments = ["-p", "x", *flat, "--max-tokens", "150", "--n", "4"]
    _, output, _ = run(wandering, *arguments, "--json")
    texts = [choice["text"] for choice in json.loads(output)["choices"]]
    assert "\x1b" in "".join(texts)
    _, output, _ = run(wandering, *arguments)
    controls = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0))} - {"\n", "\t"}
    assert controls.isdisjoint(output)


def test_stop_texts_end_the_answer(run: Run, model: Path) -> None:
    _, output, _ = run(model, "-p", "\n", "--stop", "é€", "--stop", "nothing")
    assert output == "Fine, d\n"
    _, output, _ = run(model, "-p", "\n", "--stop", "Fine", "--json")
    assert json.loads(output)["choices"][0]["text"] == ""
    assert json.loads(output)["choices"][0]["finish_reason"] == "stop"


# Wrong use.


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--top-k", "-1"], "top-k"),
        (["--top-p", "0"], "top-p"),
        (["--min-p", "2"], "min-p"),
        (["--repeat-penalty", "0"], "repeat-penalty"),
        (["--presence-penalty", "1e9"], "presence-penalty"),
        (["--frequency-penalty", "-1e9"], "frequency-penalty"),
        (["--seed", "18446744073709551616"], "seed"),
        (["--seed", "1.5"], "--seed"),
        (["--max-tokens", "0"], "max-tokens"),
        (["--stop", ""], "stop"),
        (["--n", "0"], "--n"),
        (["--n", "257"], "--n"),
        (["--threads", "0"], "--threads"),
        (["--device", "abacus"], "--device"),
        (["--page-tokens", "24"], "page-tokens"),
        (["--page-tokens", "1000000000"], "page-tokens"),
        (["--ctx-size", "0"], "ctx-size"),
    ],
)
def test_a_flag_out_of_range_is_wrong_use(
    run: Run, model: Path, arguments: list[str], flag: str
) -> None:
    code, *rest = run(model, "-p", "x", *arguments)
    assert code == 2
    assert flag in sentence(code, *rest)


def test_an_instruction_set_that_is_not_here_is_wrong_use(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAY_ISA", "nonsense")
    code, *rest = run(model, "-p", "x")
    assert code == 2
    said = sentence(code, *rest)
    assert "LLAMAY_ISA" in said
    assert "scalar" in said


def test_large_numbers_are_no_error(run: Run, model: Path) -> None:
    large = ["--top-k", str(2**70), "--max-tokens", str(2**70), "--ctx-size", str(2**70)]
    assert run(model, "-p", "\n", *large) == (0, f"{ANSWER}\n", "")


def test_a_model_that_is_not_there_or_broken_is_one_sentence(
    run: Run, tmp_path: Path, empty_home: Path
) -> None:
    assert "absent.gguf" in sentence(*run(tmp_path / "absent.gguf", "-p", "x"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(50))
    assert "broken.gguf" in sentence(*run(broken, "-p", "x"))


def test_a_model_that_computes_nonsense_is_one_sentence(run: Run, tmp_path: Path) -> None:
    config, path = TinyConfig(), tmp_path / "inf.gguf"
    tensors = tiny_tensors(config)
    tensors["output_norm.weight"] = float_tensor(np.full(config.hidden, math.inf, "f4"))
    write_gguf(path, tiny_metadata(config), tensors)
    code, *rest = run(path, "-p", "x")
    assert code == 1
    assert "not finite" in sentence(code, *rest)


def test_chat_without_a_template_is_one_sentence(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_scripted_model(path, **{"tokenizer.chat_template": None})
    code, *rest = run(path, "-p", "x", "--chat")
    assert code == 1
    assert "chat template" in sentence(code, *rest)
    assert run(path, "-p", "x")[0] == 0


# As a process.


def endless(model: Path) -> list[str]:
    return [*LLAMAY, "generate", "-m", str(model), "-p", "0", "--ctx-size", "100000000"]


def test_ctrl_c_in_the_middle_of_an_answer_is_quiet_and_130(model: Path) -> None:
    with subprocess.Popen(
        endless(model), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(20) == b"12345678901234567890"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said == b""


def test_ctrl_c_gives_no_half_json(model: Path) -> None:
    with subprocess.Popen(
        [*endless(model), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1.5)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", b"")
    assert process.returncode == 130


def test_a_reader_that_goes_away_ends_the_answer_quietly(model: Path) -> None:
    with subprocess.Popen(
        endless(model), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(10) == b"1234567890"
        process.stdout.close()
        assert process.wait(timeout=20) == 141
        assert process.stderr.read() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_an_output_that_cannot_be_written_is_one_sentence(
    model: Path, arguments: list[str]
) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*LLAMAY, "generate", "-m", str(model), "-p", "\n", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.returncode == 1
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1
    assert "No space left on device" in process.stderr


def test_a_locale_without_umlauts_does_not_end_the_program(model: Path) -> None:
    process = subprocess.run(
        [*LLAMAY, "generate", "-m", str(model), "-p", "\n"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert (process.returncode, process.stdout) == (0, b"Fine, d\\xe9\\u20acp!\n")


# The default model.


def generate_json(model: Path, *arguments: str) -> dict[str, Any]:
    command = [*LLAMAY, "generate", "-m", str(model), "--json", *arguments]
    result: dict[str, Any] = json.loads(subprocess.check_output(command))
    return result


@pytest.mark.model
def test_the_capital_of_france(default_model_path: Path, run: Run) -> None:
    question = ["-p", "The capital of France is", "--temperature", "0", "--max-tokens", "48"]
    code, output, said = run(default_model_path, *question)
    assert (code, said) == (0, "")
    assert output.startswith(" Paris")
    results = [
        generate_json(default_model_path, *question, "--threads", threads)["choices"]
        for threads in ("2", "2", "1")
    ]
    assert results[0] == results[1] == results[2]
    assert results[0][0]["text"] + "\n" == output


@pytest.mark.model
@pytest.mark.timing
def test_a_short_prompt_s_first_token_comes_within_a_second(default_model_path: Path) -> None:
    """Other programs only add to what it takes, so that the fastest of five runs counts."""
    waits = []
    for _ in range(5):
        timings = generate_json(default_model_path, "-p", "Hi", "--max-tokens", "1")["timings"]
        waits.append(timings["open_s"] + timings["prefill_s"])
    assert min(waits) < 1
