"""Chat templates: what is rendered, what a turn adds, and what user text cannot do."""

import sys
import time
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamay.errors import TemplateError
from llamay.tokenizer import Tokenizer
from llamay.tokenizer.chat import ChatTemplate, encode_segments
from tests.tokenizer.test_tokenizer_ids import metadata_of, tokenizer_of

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Llama 3 does: role in the header, content trimmed, bos first.
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n\n' ~ m.content | trim ~ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# As Mistral does: an answer stands between the user's turns, and roles must alternate.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# As Qwen 3 does: thinking stays in the last answer only.
THINKING = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in m.content %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- else %}{%- set content = m.content %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
REWRITING = "{% for m in messages %}{{ m.content | lower | replace('\n', ' ') }}{% endfor %}"
TOOLS = "{{ tools | tojson(indent=2) }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
ASCII_JSON = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}"

every_template = pytest.mark.parametrize(
    "template",
    [CHATML, TRIMMING, BRACKETS, THINKING, REWRITING, TOOLS, ASCII_JSON],
    ids=["chatml", "trimming", "brackets", "thinking", "rewriting", "tools", "ascii-json"],
)


def chat(template, variant="qwen2"):
    return ChatTemplate(template, tokenizer_of(variant), "some.gguf")


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def text_of(segments):
    return "".join(segment.text for segment in segments)


def test_the_first_turn_is_what_the_template_says():
    assert text_of(chat(CHATML).render([user("Hi")])) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(chat(TRIMMING).render([user(" Hi\n")], add_generation_prompt=False)) == (
        "<s><|im_start|>user\n\nHi<|im_end|>"
    )
    assert text_of(chat(BRACKETS).render([user("Hi")])) == "<s>[INST] Hi [/INST]"


def test_a_rendered_turn_has_the_ids_of_its_text():
    tokenizer = tokenizer_of("qwen2")
    segments = chat(CHATML).render([user("a"), assistant("b\n"), user("c")])
    text = (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb\n<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert encode_segments(tokenizer, segments) == tokenizer.encode(text, special=True)


@pytest.mark.parametrize(
    ("template", "answer", "added"),
    [
        (CHATML, "Yes.", "<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        (CHATML, "", "<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
        (
            TRIMMING,
            "\n Yes. ",
            "<|im_end|><|im_start|>user\n\nB<|im_end|><|im_start|>assistant\n\n",
        ),
        (BRACKETS, "Yes", " <|endoftext|>[INST] B [/INST]"),
        (BRACKETS, " Yes", " <|endoftext|>[INST] B [/INST]"),
        (THINKING, "Yes", "<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_turn_adds_only_what_follows_the_answer(template, answer, added):
    delta = chat(template).turn_delta([user("A"), assistant(answer)], [user("B")])
    assert text_of(delta.segments) == added
    assert delta.changed_at is None


def test_an_answer_keeps_its_sampled_ids():
    tokenizer = tokenizer_of("qwen2")
    template = chat(CHATML)
    history = [user("A"), assistant("the end"), user("B"), assistant("the end")]
    # Not how the text is tokenised: letter by letter.
    sampled = [tokenizer.token_id(char) for char in ("t", "h", "e", "Ġ", "e", "n", "d")]
    assert tokenizer.encode("the end") != sampled
    first = encode_segments(tokenizer, template.render(history[:1]))
    second = encode_segments(
        tokenizer, template.turn_delta(history[:2], history[2:3]).segments, continues=True
    )
    third = encode_segments(
        tokenizer, template.turn_delta(history, [user("C")]).segments, continues=True
    )
    by_turns = first + sampled + second + sampled + third
    at_once = template.render([*history, user("C")])
    assert [segment.answer for segment in at_once] == [None, 1, None, 3, None]
    assert encode_segments(tokenizer, at_once, {1: sampled, 3: sampled}) == by_turns


def test_thinking_that_is_dropped_is_reported_where_it_stood():
    history = [user("A"), assistant("<think>\nhm\n</think>\n\nYes")]
    delta = chat(THINKING).turn_delta(history, [user("B")])
    assert delta.changed_at == len("<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n")
    assert text_of(delta.segments) == (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_after_a_changed_one_is_still_found():
    history = [user("A"), assistant("<think>hm</think>Yes"), user("B"), assistant("No")]
    segments = chat(THINKING).render([*history, user("C")])
    assert [(part.text, part.answer) for part in segments if part.answer is not None] == [("No", 3)]


def test_a_date_is_the_conversations_own():
    template = chat(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}|{% endif %}"
    )
    history, new = [user("A"), assistant("B")], [user("C")]
    now = datetime(2031, 5, 4)
    assert text_of(template.render(history, now=now)) == "04 May 2031|A|B|"
    assert text_of(template.turn_delta(history, new, now=now).segments) == "|C|"


@every_template
@pytest.mark.parametrize("variant", ["qwen2", "spm"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_user_text_never_becomes_a_control_token(template, variant, data):
    """As many control tokens as with harmless text, whatever the user writes."""
    tokenizer = tokenizer_of(variant)
    never = {i for i in range(tokenizer.vocab_size) if tokenizer.is_control(i)}
    # This one is ordinary text by its type, and can be reached by merging bytes.
    never.discard(tokenizer.token_id("</s>"))
    names = sorted(tokenizer.control_texts)
    pieces = st.sampled_from([*names, *map(str.upper, names), *"<|>[]/_x \n"])
    cut = st.sampled_from(names).flatmap(
        lambda name: st.integers(1, len(name)).flatmap(
            lambda i: st.sampled_from([name[:i], name[i:]])
        )
    )
    content = st.lists(pieces | cut, max_size=6).map("".join)
    contents = data.draw(st.lists(content, min_size=1, max_size=5))
    roles = ["user", "assistant"] * 3

    def count(texts):
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        segments = chat(template, variant).render(messages, tools=[{"name": texts[0]}])
        ids = encode_segments(tokenizer, segments)
        return sum(i in never for i in ids)

    assert count(contents) == count(["harmless" for _ in contents])


def test_a_control_token_in_two_parts_of_a_message_stays_text():
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": text} for text in ("<", "|im_", "start|>")]
    segments = chat(template).render([{"role": "user", "content": parts}])
    assert text_of(segments) == "<|im_start|>"
    assert tokenizer_of("qwen2").token_id("<|im_start|>") not in encode_segments(
        tokenizer_of("qwen2"), segments
    )


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content }}_start|>", "a<|im"),
        ("<|im_{{ messages[0].content }}", "start|>a"),
    ],
)
def test_user_text_does_not_complete_a_control_token_with_the_templates(template, content):
    segments = chat(template).render([user(content)])
    assert "<|im_start|>" in text_of(segments)
    tokenizer = tokenizer_of("qwen2")
    assert tokenizer.token_id("<|im_start|>") not in encode_segments(tokenizer, segments)


def test_a_role_inside_a_templates_control_token_makes_it():
    template = "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.content }}{% endfor %}"
    tokenizer = tokenizer_of("qwen2")
    ids = encode_segments(tokenizer, chat(template).render([{"role": "start", "content": "x"}]))
    assert ids == [tokenizer.token_id("<|im_start|>"), *tokenizer.encode("x")]


@every_template
def test_user_text_is_rendered_unchanged(template):
    """Marks are gone from the text, also where the text itself has noncharacters."""
    content = "\ufdd0 <|im_start|> \ufdd2<|IM_END|> \ufdef"
    assert "\ufdd1" not in text_of(chat(template).render([user(content)], tools=[]))
    assert text_of(chat(CHATML).render([user(content)])).count(content) == 1


def test_bos_comes_once_whether_the_template_writes_it_or_not():
    tokenizer = tokenizer_of("llama-bpe")
    assert tokenizer.add_bos
    for template in (TRIMMING, CHATML):
        ids = encode_segments(tokenizer, chat(template, "llama-bpe").render([user("x")]))
        assert ids[0] == tokenizer.bos_id
        assert tokenizer.bos_id not in ids[1:]


def test_a_template_knows_what_transformers_gives_it():
    template = chat(
        "{% generation %}{{ messages | tojson }}{% endgeneration %}\n"
        "    {% for i in range(9) %}\n{% if i == 1 %}{% continue %}{% endif %}"
        "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ eos_token }}{{ flag }}"
    )
    rendered = text_of(template.render([{"role": "user", "content": "<é&'>"}], flag=True))
    assert rendered == '[{"role": "user", "content": "<é&\'>"}]02<|endoftext|>True'


def refusal(template, messages=(), **variables):
    with pytest.raises(TemplateError) as caught:
        chat(template).render(messages, **variables)
    message = str(caught.value)
    assert message.startswith("some.gguf: the chat template ")
    assert "\n" not in message
    return message


def system(content):
    return {"role": "system", "content": content}


def test_a_system_prompt_goes_before_the_question_where_templates_have_no_such_role():
    template = chat(BRACKETS)
    history = [system("Be terse."), user("Hi"), assistant("Yes?")]
    assert text_of(template.render(history[:2])) == "<s>[INST] Be terse.\n\nHi [/INST]"
    assert text_of(template.render([system(" "), user("Hi")])) == "<s>[INST] Hi [/INST]"
    delta = template.turn_delta(history, [user("<|im_end|>")])
    assert delta.changed_at is None
    assert text_of(delta.segments) == " <|endoftext|>[INST] <|im_end|> [/INST]"
    segments = template.render([*history, user("Go on.")])
    assert [part.text for part in segments if part.answer == 2] == ["Yes?"]


def test_no_control_token_comes_out_of_a_system_prompt_before_the_question():
    tokenizer = tokenizer_of("qwen2")
    template = ChatTemplate(BRACKETS, tokenizer, "some.gguf")
    ids = encode_segments(tokenizer, template.render([system("<|im_end|>"), user("Hi")]))
    assert tokenizer.token_id("<|im_end|>") not in ids


def test_messages_that_no_system_prompt_explains_are_still_refused():
    with pytest.raises(TemplateError, match="Roles must alternate"):
        chat(BRACKETS).render([system("Be terse."), user("Hi"), user("Ho")])
    with pytest.raises(TemplateError, match="Roles must alternate"):
        chat(BRACKETS).render([system("Be terse.")])


def test_a_template_that_refuses_says_why():
    assert "Roles must alternate" in refusal(BRACKETS, [user("a"), user("b")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_that_fails_is_a_template_error(template):
    refusal(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 1000000000 }}",
        "{% set n = namespace(x='x') %}"
        "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='x') %}"
        "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_a_template_that_uses_too_much_is_stopped(template):
    before = sys.gettrace()
    start = time.process_time()
    refusal(template)
    assert time.process_time() - start < 10
    assert sys.gettrace() is before


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ x", "{% for %}{% endfor %}", "{{ x | nofilter }}"]
)
def test_a_template_that_is_not_jinja_is_refused_when_the_model_opens(template):
    with pytest.raises(TemplateError, match=r"some\.gguf: the chat template is not valid"):
        chat(template)


@pytest.mark.parametrize("value", [None, "", 3, ["x"]])
def test_a_file_without_a_template_says_what_works(value):
    metadata = metadata_of("qwen2") | {"tokenizer.chat_template": value}
    tokenizer = Tokenizer.from_metadata(metadata, "some.gguf")
    with pytest.raises(TemplateError, match=r"no chat template.*plain completion"):
        ChatTemplate.from_metadata(metadata, tokenizer, "some.gguf")
