"""Conversations in the tokenizer's own chat template: what an assistant is asked with, and what it answers.

Many templates write a conversation that goes on as what was there and more: it is one sequence, of which the answers are learned. Some
write earlier answers otherwise (Qwen3 leaves their thoughts away): there each answer is a sequence of its own, behind what the model
would be given when it is asked for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.records import Message

Span = tuple[list[int], bool]
"""Tokens, and whether they are learned."""


class UnwrittenError(Exception):
    """The template refuses a conversation; the text says why."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer: the text and the tokens of all before it, and its own."""

    before: str
    prompt: list[int]
    after: str
    answer: list[int]


def conversation_spans(messages: Sequence[Message], tokenizer: Any) -> list[list[Span]]:
    """Return the sequences of a conversation, each as the spans that it has.

    Raises FinetuneError where the tokenizer has no template, or one that asks for an answer otherwise than it writes it, and
    UnwrittenError where it refuses these messages.
    """
    if not tokenizer.chat_template:
        raise FinetuneError(
            "the tokenizer has no chat template, so `messages` cannot be written as text; give prompt and completion, or text"
        )
    turns = [{"role": m.role, "content": m.content} for m in messages]
    answers = [_answer(turns[: i + 1], tokenizer) for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    spans: list[Span] = []
    done, done_tokens = "", list[int]()
    for answer in answers:
        if not answer.before.startswith(done) or answer.prompt[: len(done_tokens)] != done_tokens:
            return [[(answer.prompt, False), (answer.answer, True)] for answer in answers]
        spans += [(answer.prompt[len(done_tokens) :], False), (answer.answer, True)]
        done, done_tokens = answer.after, answer.prompt + answer.answer
    return [spans]


def _answer(turns: list[dict[str, str]], tokenizer: Any) -> _Answer:
    before, after = _written(tokenizer, turns[:-1], asking=True), _written(tokenizer, turns, asking=False)
    if not after.startswith(before):
        raise FinetuneError(
            "the tokenizer's chat template asks for an answer otherwise than it writes it; give prompt and completion"
        )
    prompt, whole = _tokens(tokenizer, before), _tokens(tokenizer, after)
    if whole[: len(prompt)] == prompt:
        return _Answer(before, prompt, after, whole[len(prompt) :])
    return _Answer(before, prompt, after, _tokens(tokenizer, after[len(before) :]))  # a token would span the two


def _written(tokenizer: Any, turns: list[dict[str, str]], *, asking: bool) -> str:
    from jinja2 import TemplateError  # transformers loads it here, and a process that trains does not come here

    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asking)
    except TemplateError as error:
        raise UnwrittenError(str(error)) from error
    return text


def _tokens(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
