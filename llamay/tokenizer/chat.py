"""Chat templates: messages -> text in which user text cannot become a control token.

The file's own Jinja template is rendered. Where a message spells a control token, a mark (a
Unicode noncharacter that occurs nowhere else) goes before it into the message; the template
carries the mark through, and it comes out of the rendered text as a *guard*: an offset at which
the tokenizer matches no control token. Everything else of a message passes unchanged, so templates
may trim, split and test it as they do elsewhere.

What the assistant said is never tokenised again (its ids are history), so rendered text is cut
into segments, and each answer that the template repeats word for word is a segment of its own. It
is found by rendering once more with a placeholder for each answer.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import jinja2

from llamay.errors import TemplateError
from llamay.tokenizer.sandbox import TemplateEnvironment, TemplateLimitError, run_bounded
from llamay.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]

KEY = "tokenizer.chat_template"
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered conversation.

    text:   what to tokenise, with `Tokenizer.encode(text, special=True, guards=guards)`
    guards: offsets into `text`, ascending, at which user text spells a control token
    answer: the index of the assistant's message whose text this is, word for word; None for what
            the template wrote, other messages' text, and answers that the template changed
    """

    text: str
    guards: tuple[int, ...] = ()
    answer: int | None = None


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What a new turn adds to a conversation.

    segments:   what to append to the ids so far, or the whole conversation if it changed
    changed_at: None, or the offset in the rendered text at which the template changed what it
                made of the earlier messages, so that the ids so far do not go on
    """

    segments: list[Segment]
    changed_at: int | None = None


class ChatTemplate:
    """A file's chat template; usable by one thread at a time."""

    def __init__(self, template: str, tokenizer: Tokenizer, source: str) -> None:
        """Compile `template`; `source` names the file in errors.

        Raises TemplateError if it is no valid Jinja.
        """
        self._source = source
        self._text = template
        self._environment = TemplateEnvironment()
        self._tokens = {
            "bos_token": _spelling(tokenizer, tokenizer.bos_id),
            "eos_token": _spelling(tokenizer, tokenizer.eos_id),
        }
        self._spelled = _ControlSpelling(tokenizer.control_texts)
        try:
            self._template = self._environment.from_string(template)
        except (jinja2.TemplateError, RecursionError) as error:
            raise self._error(f"is not valid ({_sentence(error)})") from error

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, source: str
    ) -> "ChatTemplate":
        """The template of a GGUF file; raises TemplateError if it has none or it is not valid."""
        template = metadata.get(KEY)
        if not isinstance(template, str) or not template:
            raise TemplateError(
                f"{source}: there is no chat template ({KEY}) in this file; "
                "use plain completion, or a model made for chat."
            )
        return cls(template, tokenizer, source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> list[Segment]:
        """Render a conversation; the segments' texts, joined, are what the template makes of it.

        messages:  {"role": ..., "content": ...} and whatever else the template knows
        now:       the time that templates with a date are told; the current one by default. Give
                   the conversation's own so that its earlier text does not change overnight.
        variables: given to the template as they are: tools, enable_thinking, ...

        Raises TemplateError if the template refuses the messages, fails, or does not end.
        """
        self._environment.now = now or datetime.now()
        marks = self._unused_characters(messages, variables)
        variables = {**variables, "add_generation_prompt": add_generation_prompt}
        marked = [self._mark(message, marks[0]) for message in messages]
        options = self._mark(variables, marks[0])
        text, guards = _take_marks(self._run(marked, options), marks[0])
        answers = {
            i: message["content"]
            for i, message in enumerate(messages)
            if message.get("role") == "assistant"
            and isinstance(message.get("content"), str)
            and (message["content"] or "tool_calls" not in message)
        }
        if not answers:
            return _segments(text, guards, [])
        spans = self._find_answers(text, marked, options, answers, marks)
        return _segments(text, guards, spans)

    def turn_delta(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        *,
        now: datetime | None = None,
        **variables: Any,
    ) -> TurnDelta:
        """What `new` messages add after `history`, whose last message is the answer just given.

        `history` was rendered turn by turn, so the ids so far end with that answer's ids (without
        the token that ended it). With an empty history, everything is new. Errors as `render`.
        """
        now = now or datetime.now()
        segments = self.render([*history, *new], now=now, **variables)
        if not history:
            return TurnDelta(segments)
        before = "".join(part.text for part in self.render(history[:-1], now=now, **variables))
        for i, segment in enumerate(segments):
            if segment.answer == len(history) - 1:
                earlier = "".join(part.text for part in segments[:i])
                # White space around an answer is the template's taste, not another text.
                if earlier.rstrip() == before.rstrip():
                    return TurnDelta(segments[i + 1 :])
        text = "".join(part.text for part in segments)
        return TurnDelta(segments, changed_at=_common_length(before, text))

    def _find_answers(
        self,
        text: str,
        marked: Sequence[Any],
        options: Mapping[str, Any],
        answers: Mapping[int, str],
        marks: Sequence[str],
    ) -> list[tuple[int, int, int]]:
        """(start, end, message) of every answer that stands in `text` word for word."""
        mark, edge = marks
        holders = [
            {**message, "content": f"{edge}{i}{edge}"} if i in answers else message
            for i, message in enumerate(marked)
        ]
        try:
            frame, _ = _take_marks(self._run(holders, options), mark)
        except TemplateError:
            return []
        parts = re.split(f"{edge}([0-9]+){edge}", frame)
        spans: list[tuple[int, int, int]] = []
        if not text.startswith(parts[0]):
            return spans
        position = len(parts[0])
        for number, after in zip(parts[1::2], parts[2::2], strict=True):
            answer = answers[int(number)]
            found = _verbatim_end(text, position, answer, after)
            if found is None:
                # Not this answer; the next one may still be found behind the template's own text.
                end = text.find(after, position) if after else -1
                if end < 0:
                    return spans
            else:
                end = found
                spans.append((position, end, int(number)))
            position = end + len(after)
        return spans

    def _run(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        template = self._template
        try:
            return run_bounded(
                lambda: template.render(messages=messages, **self._tokens, **variables),
                template.root_render_func.__code__.co_filename,
            )
        except TemplateLimitError as error:
            raise self._error(f"uses too much ({error})") from error
        except (MemoryError, RecursionError) as error:
            raise self._error("uses too much (memory)") from error
        except jinja2.TemplateError as error:
            if folded := _with_system_in_the_question(messages):
                return self._run(folded, variables)
            raise self._error(f"refuses these messages ({_sentence(error)})") from error
        except Exception as error:
            raise self._error(f"fails on these messages ({_sentence(error)})") from error

    def _error(self, what: str) -> TemplateError:
        return TemplateError(
            f"{self._source}: the chat template {what}; "
            "change the messages, or use plain completion."
        )

    def _unused_characters(self, messages: Sequence[Message], variables: object) -> list[str]:
        """Two noncharacters that occur neither in the template nor in what it is given."""
        texts = [self._text, *_strings([messages, variables])]
        unused = [
            char
            for char in _NONCHARACTERS
            if not any(char in text or _escaped(char) in text for text in texts)
        ]
        if len(unused) < 2:
            raise self._error("is given text with all of Unicode's noncharacters U+FDD0 to U+FDEF")
        return unused[:2]

    def _mark(self, value: Any, mark: str) -> Any:
        """`value` with a mark before whatever may become (part of) a control token in it."""
        if isinstance(value, str):
            places = self._spelled.places(value)
            edges = [0, *places, len(value)]
            return mark.join(value[a:b] for a, b in pairwise(edges))
        if isinstance(value, Mapping):
            return {self._mark(key, mark): self._mark(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, mark) for item in value]
        return value


class _ControlSpelling:
    """Finds where a text may become a control token, by itself or with text around it."""

    def __init__(self, control_texts: Iterable[str]) -> None:
        # Case does not count, since templates may change it.
        texts = {text.casefold() for text in control_texts}
        self._texts = texts
        self._lengths = sorted({len(text) for text in texts})
        self._prefixes = {text[:i] for text in texts for i in range(1, len(text))}
        self._suffixes = {text[i:] for text in texts for i in range(1, len(text))}
        letters = "".join(re.escape(letter) for letter in sorted({text[0] for text in texts}))
        self._start = re.compile(f"[{letters}]", re.IGNORECASE) if letters else None

    def places(self, text: str) -> list[int]:
        """Offsets into `text`, ascending, before which a guard keeps control tokens out."""
        if self._start is None:
            return []
        places = {
            match.start()
            for match in self._start.finditer(text)
            if any(
                text[match.start() : match.start() + length].casefold() in self._texts
                for length in self._lengths
            )
        }
        for length in range(1, min(self._lengths[-1], len(text) + 1)):
            if text[-length:].casefold() in self._prefixes:
                places.add(len(text) - length)
            if text[:length].casefold() in self._suffixes:
                places.add(0)
        return sorted(places)


def encode_segments(
    tokenizer: Tokenizer,
    segments: Sequence[Segment],
    answers: Mapping[int, Sequence[int]] = MappingProxyType({}),
    *,
    continues: bool = False,
) -> list[int]:
    """The ids of rendered segments, with bos before them if the model wants one.

    answers:   the ids that were sampled for an answer, by `Segment.answer`; they are taken as
               they are, and answers without ids are tokenised with the text around them
    continues: the segments follow ids that are already there, so there is no bos
    """
    starts = not continues
    ids: list[int] = []
    text, guards = "", list[int]()
    for segment in segments:
        known = answers.get(segment.answer) if segment.answer is not None else None
        if known is None:
            guards += [len(text) + guard for guard in segment.guards]
            text += segment.text
            continue
        ids += tokenizer.encode(text, special=True, guards=guards, continues=continues)
        ids += known
        text, guards, continues = "", [], True
    ids += tokenizer.encode(text, special=True, guards=guards, continues=continues)
    if starts and tokenizer.add_bos and ids[:1] != [tokenizer.bos_id]:
        ids[:0] = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return ids


def _segments(
    text: str, guards: Sequence[int], spans: Sequence[tuple[int, int, int]]
) -> list[Segment]:
    """Cut the text at the spans (start, end, answer); no segment but an answer is empty."""
    cuts: list[tuple[int, int, int | None]] = []
    position = 0
    for start, end, answer in spans:
        cuts += [(position, start, None), (start, end, answer)]
        position = end
    cuts.append((position, len(text), None))
    return [
        Segment(
            text[start:end],
            tuple(guard - start for guard in guards if start <= guard < end),
            answer,
        )
        for start, end, answer in cuts
        if start < end or answer is not None
    ]


def _take_marks(text: str, mark: str) -> tuple[str, list[int]]:
    """The text without marks, and the offsets where they were."""
    # A template that dumps JSON in ASCII writes the mark's escape.
    parts = re.split(f"{mark}|{re.escape(_escaped(mark))}", text)
    return "".join(parts), list(accumulate(map(len, parts[:-1])))


def _verbatim_end(text: str, start: int, answer: str, after: str) -> int | None:
    """Where `answer`, trimmed or not, ends in `text` if it starts at `start` before `after`."""
    for spelling in (answer, answer.strip(), answer.lstrip(), answer.rstrip()):
        end = start + len(spelling)
        if text.startswith(spelling, start) and text.startswith(after, end):
            return end
    return None


def _common_length(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _with_system_in_the_question(messages: Sequence[Any]) -> list[Any] | None:
    """The messages for templates without a system role, such as Gemma 2's; None if they have none.

    What the system prompt says then stands before the first question, as other programs do it.
    """
    match messages:
        case [
            {"role": "system", "content": str(system)},
            {"role": "user", "content": str(question)} as user,
            *others,
        ]:
            content = f"{system}\n\n{question}" if system.strip() else question
            return [{**user, "content": content}, *others]
    return None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}"


def _spelling(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _sentence(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200].rstrip(". ")
