"""What an assistant is asked with and what it answers, whatever the tokenizer's template
does to what was said before.
"""

import datetime
import itertools
from typing import Any

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.conversations import ConversationWriter, UnwrittenError
from port_agent.finetuning.text.shapes import Message, Record, record_of
from tests.agent.finetuning.tiny_model import TALK, TEMPLATE, THOUGHTS

DAY = datetime.date(2025, 3, 9)
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
WITH_CALLS = (
    "{% if tools %}tools {{ tools | tojson }}\n"
    "{% endif %}{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for c in "
    "m.tool_calls %}call {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}</s>{% endfor %}{% if "
    "add_generation_prompt %}<s>assistant\n"
    "{% endif %}"
)
WITH_CALLS_AS_TEXT = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ ' with ' + c.function.arguments }}")
CALLS_WHERE_NO_CONTENT = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.content is none or m.content is not defined %}{% for c in m.tool_calls %}call {{ c.function.name }}{% "
    "endfor %}{% else %}{{ m.content }}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n"
    "{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>{{ m.content.split('</think>')[-1] "
    "}}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n"
    "{% endif %}"
)
IN_PARTS = TEMPLATE.replace("{{ m['content'] }}", "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}")


def written(tokenizer: Any, record: Record = Record(messages=TALK)) -> list[list[str]]:  # noqa: B008
    """Return of each text its parts, those that are learned at the odd places."""
    found = []
    for text in ConversationWriter(tokenizer, DAY).texts(record):
        borders = [0, *(border for span in text.learned for border in span), len(text.text)]
        found.append([text.text[a:b] for a, b in itertools.pairwise(borders)])
    return found


def calls(**changed: Any) -> Record:
    asked, answer = {"role": "user", "content": "rain?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return record_of({"messages": [asked, {**answer, **changed}], "tools": TOOLS})[0]


def test_a_conversation_that_goes_on_as_it_was_is_one_text(tokenizer: Any) -> None:
    prompt = "<s>user\nto be or</s><s>assistant\n"
    assert written(tokenizer) == [
        [prompt, "not to be</s>", "<s>user\nthat is</s><s>assistant\n", "the question</s>", ""]
    ]


def test_where_earlier_answers_are_written_otherwise_each_is_learned_behind_what_it_is_asked_with(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", THOUGHTS)
    prompt = "<s>user\nto be or</s><s>assistant\n"
    assert written(tokenizer) == [
        [prompt, "the mind not to be</s>", ""],
        [f"{prompt}not to be</s><s>user\nthat is</s><s>assistant\n", "the mind the question</s>", ""],
    ]


def test_the_whole_message_goes_to_the_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", WITH_CALLS)
    ((asked, answer, _),) = written(tokenizer, calls(reasoning_content="look"))
    assert asked.startswith('tools [{"type": "function"') and asked.endswith("<s>assistant\n")
    assert answer == '<think>look</think>call weather {"city": "Bern"}</s>'
    monkeypatch.setattr(tokenizer, "chat_template", WITH_CALLS_AS_TEXT)
    ((_, answer, _),) = written(tokenizer, calls())
    assert answer == 'call weather  with {"city": "Bern"}</s>'
    monkeypatch.setattr(tokenizer, "chat_template", CALLS_WHERE_NO_CONTENT)
    assert written(tokenizer, calls())[0][1] == "call weather</s>"


def test_what_the_template_leaves_away_is_refused_or_counted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnwrittenError, match="leaves out part of an answer: 'weather'"):
        written(tokenizer, calls())
    writer = ConversationWriter(tokenizer, DAY)
    named = Message("user", "to be", more={"name": "Hamlet", "id": 3})
    answer = Message("assistant", "or", more={"reasoning_content": "hm"})
    writer.texts(Record(messages=(named, answer), tools=({},)))
    assert dict(writer.ignored) == {"name": 1, "id": 1, "reasoning_content": 1, "tools": 1}
    monkeypatch.setattr(
        tokenizer, "chat_template", TEMPLATE.replace("{{ m['role'] }}", "{{ m['role'] }}{{ m['name'] }}")
    )
    writer = ConversationWriter(tokenizer, DAY)
    writer.texts(Record(messages=(named, answer)))
    assert (writer.ignored["name"], writer.ignored["id"]) == (0, 1)


def test_messages_that_the_template_does_not_write_are_counted_by_role(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Message("system", "be kind")
    writer = ConversationWriter(tokenizer, DAY)
    writer.texts(Record(messages=(system, *TALK)))
    assert not +writer.ignored
    monkeypatch.setattr(tokenizer, "chat_template", "{% set messages = messages[1:] %}" + TEMPLATE)
    writer = ConversationWriter(tokenizer, DAY)
    writer.texts(Record(messages=(system, *TALK)))
    assert dict(+writer.ignored) == {"system messages": 1}


def test_content_in_parts_is_written_as_the_template_has_it(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "to "}, {"type": "text", "text": "be"}]}
    record, _ = record_of({"messages": [parts, {"role": "assistant", "content": "or"}]})
    plain = written(tokenizer, record)
    assert plain == [["<s>user\nto be</s><s>assistant\n", "or</s>", ""]]
    monkeypatch.setattr(tokenizer, "chat_template", IN_PARTS)
    assert written(tokenizer, record) == plain


@pytest.mark.parametrize("shown", ["m['content'][:3]", "m['content'] | replace('  ', ' ')", "m['content'] | upper"])
def test_a_template_that_changes_an_answer_is_not_given_it_in_parts(
    shown: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("m['content']", shown))
    record = Record(messages=(Message("user", "to be"), Message("assistant", "or  not")))
    with pytest.raises(UnwrittenError, match="leaves out part of an answer: 'or  not'"):
        written(tokenizer, record)


def test_messages_after_the_last_learned_answer_are_not_called_unwritten(tokenizer: Any) -> None:
    writer = ConversationWriter(tokenizer, DAY)
    unlearned = Message("assistant", "the question", learned=False)
    writer.texts(Record(messages=(*TALK[:3], unlearned)))
    assert not +writer.ignored


def test_what_has_no_weight_is_not_learned(tokenizer: Any) -> None:
    turns = [{"role": m.role, "content": m.content, "weight": int(m.content != "not to be")} for m in TALK]
    record, _ = record_of({"messages": turns})
    assert [text[1::2] for text in written(tokenizer, record)] == [["the question</s>"]]


def test_thoughts_that_the_template_begins_are_learned_or_ended_at_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", DEEPSEEK)
    assert written(tokenizer) == [
        ["<U>to be or<A><think>\n", "\n</think>\n\nnot to be</s>", ""],
        ["<U>to be or<A>not to be</s><U>that is<A><think>\n", "\n</think>\n\nthe question</s>", ""],
    ]
    for answer in (
        Message("assistant", "<think>\nhm\n</think>\n\nnot"),
        Message("assistant", "not", more={"reasoning_content": "hm"}),
    ):
        thought = Record(messages=(TALK[0], answer))
        assert written(tokenizer, thought) == [["<U>to be or<A><think>\n", "hm\n</think>\n\nnot</s>", ""]]


def test_thoughts_that_the_template_begins_and_ends_itself_are_written_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = (  # as Nemotron 3's
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content "
        "}}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n"
        "{% endif %}"
    )
    monkeypatch.setattr(tokenizer, "chat_template", closed)
    writer = ConversationWriter(tokenizer, DAY)
    (text,) = writer.texts(Record(messages=TALK[:2]))
    assert text.text == "<user>to be or</s><assistant><think>\n</think>not to be</s>" and writer.thoughtless == 1


def test_an_answer_that_the_template_ends_with_nothing_gets_the_tokenizers_end(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ConversationWriter(tokenizer, DAY)
    assert [text.ended for text in writer.texts(Record(messages=TALK))] == [False] and not writer.bare
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", bare)
    (text,) = writer.texts(Record(messages=TALK))
    assert text.ended and writer.bare == 1
    stripped = bare.replace("m.content", "m.content.strip()")
    monkeypatch.setattr(tokenizer, "chat_template", stripped)
    (text,) = writer.texts(Record(messages=(TALK[0], Message("assistant", "  not to be \n"))))
    assert text.ended and writer.bare == 2


def test_a_greeting_is_read(tokenizer: Any) -> None:
    writer = ConversationWriter(tokenizer, DAY)
    (text,) = writer.texts(Record(messages=(TALK[1], *TALK)))
    assert (
        writer.greetings == 1 and len(text.learned) == 2 and text.text.startswith("<s>assistant\nnot to be</s><s>user")
    )
    with pytest.raises(UnwrittenError, match="its only answer is a greeting"):
        writer.texts(Record(messages=TALK[1:3]))


def test_the_date_is_the_one_that_is_given(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d %b %Y') }}" + TEMPLATE)
    assert written(tokenizer)[0][0].startswith("09 Mar 2025<s>user")
    assert ConversationWriter(tokenizer, DAY).question("to be").startswith("09 Mar 2025<s>user\nto be</s><s>assistant")


def test_what_a_template_cannot_write_is_said(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for template, said in (
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages | length }}", "prompt for an answer differs"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(UnwrittenError, match=said):
            written(tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(FinetuneError, match="no chat template"):
        written(tokenizer)
