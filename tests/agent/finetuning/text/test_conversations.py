"""What an assistant is asked with and what it answers, whatever the tokenizer's template does to what was said before."""

from typing import Any

import pytest

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.conversations import UnwrittenError, conversation_spans
from port_agent.finetuning.text.records import Message
from tests.agent.finetuning.tiny_model import TALK, THOUGHTS


def written(tokenizer: Any) -> list[list[tuple[str, bool]]]:
    return [[(tokenizer.decode(t), learned) for t, learned in spans] for spans in conversation_spans(TALK, tokenizer)]


def test_a_conversation_that_goes_on_as_it_was_is_one_sequence(tokenizer: Any) -> None:
    assert written(tokenizer) == [
        [
            ("<s>user\nto be or</s><s>assistant\n", False),
            ("not to be</s>", True),
            ("<s>user\nthat is</s><s>assistant\n", False),
            ("the question</s>", True),
        ]
    ]


def test_where_earlier_answers_are_written_otherwise_each_is_learned_behind_what_it_is_asked_with(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", THOUGHTS)
    prompt = "<s>user\nto be or</s><s>assistant\n"
    assert written(tokenizer) == [
        [(prompt, False), ("the mind not to be</s>", True)],
        [(f"{prompt}not to be</s><s>user\nthat is</s><s>assistant\n", False), ("the mind the question</s>", True)],
    ]


def test_a_token_that_would_span_question_and_answer_is_none(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tokenizer,
        "chat_template",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}th{% else %}{% endif %}",
    )
    talk = (Message("user", "to "), Message("assistant", "that is"))
    ((prompt, answer),) = conversation_spans(talk, tokenizer)
    assert tokenizer("to that is")["input_ids"][: len(prompt[0])] != prompt[0], "a token of its own for `that`"
    assert [tokenizer.decode(part) for part, _ in (prompt, answer)] == ["to th", "at is"]


def test_what_a_template_cannot_write_is_said(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UnwrittenError, match="roles must alternate"):
        conversation_spans(TALK, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}")
    with pytest.raises(FinetuneError, match="asks for an answer otherwise than it writes it"):
        conversation_spans(TALK, tokenizer)
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(FinetuneError, match="no chat template"):
        conversation_spans(TALK, tokenizer)
