import io
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamay import cli
from llamay.engine import Engine, Generation
from llamay.engine.scheduler import Scheduler
from llamay.mlx_kernels import Control
from llamay.model.decoder import Decoder
from tests.scripted_model import byte_ids, write_scripted_model
from tests.tiny_models import CHAT_TEMPLATE, CONTROL_TOKENS, VOCAB

# "he" and "the" are tokens of the vocabulary, but this model spells them letter by letter.
ANSWER = "the w."

Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "scripted.gguf"
    write_scripted_model(path, byte_ids(f"\n{ANSWER}".encode()))
    return path


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """Pipes lines into a chat with a model; gives its code, stdout and stderr."""
    monkeypatch.setitem(cli.COMMANDS, "chat", (cli.START, "Chat."))

    def run(model: Path, text: str | bytes, *arguments: str) -> tuple[int, str, str]:
        data = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        code = cli.main(["chat", "-m", str(model), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids that the chat answers at each turn."""
    seen: list[list[int]] = []
    admit = Scheduler._admit

    def watched(scheduler: Scheduler, generation: Generation) -> None:
        admit(scheduler, generation)
        seen.append(list(generation.request.ids))

    monkeypatch.setattr(Scheduler, "_admit", watched)
    return seen


def spelled(ids: list[int]) -> str:
    """The text of ids, control tokens in braces."""
    return (
        "".join(
            f"{{{VOCAB[token]}}}" if token < len(CONTROL_TOKENS) else VOCAB[token] for token in ids
        )
        .replace("Ċ", "\n")
        .replace("Ġ", " ")
    )


def turn(role: str, text: str) -> str:
    return f"{{<|im_start|>}}{role}\n{text}{{<|im_end|>}}\n"


OPEN = "{<|im_start|>}assistant\n"


def test_turns_follow_each_other(talk: Talk, model: Path, contexts: list[list[int]]) -> None:
    code, output, said = talk(model, "One\n\n  \nTwo\nThree")
    assert (code, output) == (0, f"{ANSWER}\n" * 3)
    assert said == "tiny llama · cpu " + said.split("cpu ")[1]
    assert said.count("\n") == 1
    expected = ""
    for text, ids in zip(("One", "Two", "Three"), contexts, strict=True):
        expected += turn("user", text)
        assert spelled(ids) == expected + OPEN
        expected += turn("assistant", ANSWER)


def test_history_is_the_ids_that_were_sampled(
    talk: Talk, model: Path, contexts: list[list[int]]
) -> None:
    talk(model, "One\nTwo\nThree\n")
    first, second, third = contexts
    sampled = byte_ids(ANSWER.encode())
    assert second[: len(first)] == first
    assert second[len(first) : len(first) + len(sampled)] == sampled
    assert third[: len(second) + len(sampled)] == second + sampled
    # The same text is other ids when it is tokenised.
    assert Engine.load(str(model)).model.encode_prompt(ANSWER) != sampled


def test_a_message_cannot_speak_for_the_model(
    talk: Talk, model: Path, contexts: list[list[int]]
) -> None:
    talk(model, "One\n<|im_end|>\n")
    assert spelled(contexts[1]).endswith(turn("user", "<|im_end|>") + OPEN)


def test_an_answer_that_was_cut_is_followed_by_the_end_of_its_turn(
    talk: Talk, model: Path, contexts: list[list[int]]
) -> None:
    _, output, _ = talk(model, "One\nTwo\n", "--max-tokens", "3")
    assert output == "the\n" * 2
    assert spelled(contexts[1]) == (
        turn("user", "One") + turn("assistant", "the") + turn("user", "Two") + OPEN
    )


def test_an_empty_answer_is_a_turn(talk: Talk, tmp_path: Path, contexts: list[list[int]]) -> None:
    path = tmp_path / "silent.gguf"
    write_scripted_model(path)
    assert talk(path, "One\nTwo\n")[:2] == (0, "\n\n")
    assert spelled(contexts[1]) == (
        turn("user", "One") + turn("assistant", "") + turn("user", "Two") + OPEN
    )


# Shows only the last answer, as templates do that drop the thinking of earlier ones.
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'user' or loop.index0 >= loop.length - 2 %}"
    "{{ message['content'] }}{% else %}...{% endif %}",
)


def test_a_template_that_changes_earlier_text_is_followed_and_said(
    talk: Talk, tmp_path: Path, contexts: list[list[int]]
) -> None:
    path = tmp_path / "forgetful.gguf"
    chain = byte_ids(f"\n{ANSWER}".encode())
    write_scripted_model(path, chain, **{"tokenizer.chat_template": FORGETFUL})
    code, output, said = talk(path, "One\nTwo\nThree\n")
    assert (code, output) == (0, f"{ANSWER}\n" * 3)
    assert said.count("the template changed earlier text") == 1
    assert spelled(contexts[1]) == (
        turn("user", "One") + turn("assistant", ANSWER) + turn("user", "Two") + OPEN
    )
    assert spelled(contexts[2]) == (
        turn("user", "One")
        + turn("assistant", "...")
        + turn("user", "Two")
        + turn("assistant", ANSWER)
        + turn("user", "Three")
        + OPEN
    )
    # The answer that is still shown is the ids that were sampled, not its text tokenised again.
    after = turn("user", "Three") + OPEN
    end = next(i for i in range(len(contexts[2])) if spelled(contexts[2][i:]) == after) - 2
    assert contexts[2][end - len(ANSWER) : end] == byte_ids(ANSWER.encode())


def test_a_template_that_never_changes_its_text_still_answers(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "constant.gguf"
    chain = byte_ids(f"\n{ANSWER}".encode())
    write_scripted_model(path, chain, **{"tokenizer.chat_template": "Say\n\n"})
    code, output, _ = talk(path, "One\nTwo\n")
    assert (code, output) == (0, f"{ANSWER}\n" * 2)


# What does not fit, and what is stopped.


def test_a_message_that_does_not_fit_is_refused_and_the_chat_goes_on(
    talk: Talk, model: Path, contexts: list[list[int]]
) -> None:
    code, output, said = talk(model, f"One\n{'x' * 300}\nTwo\n", "--ctx-size", "200")
    assert (code, output) == (0, f"{ANSWER}\n" * 2)
    assert "the context holds 200 tokens" in said
    assert spelled(contexts[1]) == (
        turn("user", "One") + turn("assistant", ANSWER) + turn("user", "Two") + OPEN
    )


def test_a_refusal_after_a_changed_template_leaves_the_conversation(
    talk: Talk, tmp_path: Path, contexts: list[list[int]]
) -> None:
    path = tmp_path / "forgetful.gguf"
    chain = byte_ids(f"\n{ANSWER}".encode())
    write_scripted_model(path, chain, **{"tokenizer.chat_template": FORGETFUL})
    talk(path, "One\nTwo\nThree\n")
    expected = contexts.copy()
    contexts.clear()
    _, _, said = talk(path, f"One\nTwo\n{'x' * 400}\nThree\n", "--ctx-size", "300")
    assert "the context holds 300 tokens" in said
    assert contexts == expected


def test_an_answer_to_the_end_of_the_context_says_so_on_a_line_of_its_own(
    talk: Talk, tmp_path: Path
) -> None:
    path = tmp_path / "endless.gguf"
    write_scripted_model(path, byte_ids(b"\n01234567890"))
    code, output, said = talk(path, "One\nTwo\n", "--ctx-size", "60")
    assert code == 0
    assert output.startswith("01234567890")
    assert output.endswith("\n")
    assert "\nthe context of 60 tokens is full\n" in said
    assert "\\n" not in said
    assert " are needed; " in said  # the second message


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, step: int, *, committed: bool) -> None:
    """Interrupts the chat in the model's nth step, before it is computed or after.

    The step then waits until the chat has cancelled it.
    """
    real, steps = Decoder.step, list[int]()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt(control: Control) -> None:
        time.sleep(0.5)  # what was told before is printed
        signal.pthread_kill(main, signal.SIGINT)
        end = time.monotonic() + 10
        while not control.cancelled and time.monotonic() < end:
            time.sleep(0.001)

    def interrupted(decoder: Decoder, cache: Any, batch: Any, control: Control) -> Any:
        steps.append(1)
        if len(steps) == step and not committed:
            interrupt(control)
        result = real(decoder, cache, batch, control)
        if len(steps) == step:
            interrupt(control)
        return result

    monkeypatch.setattr(Decoder, "step", interrupted)


@pytest.mark.parametrize("committed", [False, True])
def test_ctrl_c_while_a_message_is_read_takes_it_back(
    talk: Talk,
    model: Path,
    contexts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    # The first message is one step, each token of its answer another; 700 tokens are several.
    press_ctrl_c(monkeypatch, 1 + len(ANSWER) + 1, committed=committed)
    code, output, said = talk(model, f"One\n{'x' * 700}\nTwo\n")
    assert (code, output) == (0, f"{ANSWER}\n" * 2)
    assert "not part of the chat" in said
    assert spelled(contexts[-1]) == (
        turn("user", "One") + turn("assistant", ANSWER) + turn("user", "Two") + OPEN
    )


@pytest.mark.parametrize("committed", [False, True])
def test_ctrl_c_in_an_answer_keeps_what_was_shown(
    talk: Talk,
    model: Path,
    contexts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    press_ctrl_c(monkeypatch, 5, committed=committed)
    code, output, _ = talk(model, "One\nTwo\n")
    shown, second = output.split(" [stopped]\n")
    assert (code, second) == (0, f"{ANSWER}\n")
    assert 0 < len(shown) <= 3
    assert ANSWER.startswith(shown)
    assert spelled(contexts[1]) == (
        turn("user", "One") + turn("assistant", shown) + turn("user", "Two") + OPEN
    )


# Input and output.


def test_escape_sequences_of_a_model_do_not_reach_the_terminal(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    write_scripted_model(path, byte_ids("\n\x1b[2J\x9b1m\rZ".encode()))
    assert talk(path, "One\n")[1] == "\\x1b[2J\\x9b1m\\rZ\n"


def test_input_that_is_not_utf_8_is_wrong_use(talk: Talk, model: Path) -> None:
    code, _, said = talk(model, b"a\xff\n")
    assert code == 2
    assert said.endswith("error: standard input: expected UTF-8 text, found other bytes\n")


def test_no_input_is_no_error(talk: Talk, model: Path) -> None:
    assert talk(model, "")[:2] == (0, "")


def test_a_model_without_a_template_is_refused(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    write_scripted_model(path, **{"tokenizer.chat_template": None})
    code, output, said = talk(path, "One\n")
    assert (code, output) == (1, "")
    assert said.startswith("error: ")
    assert "chat template" in said
    assert said.count("\n") == 1
