"""Conversations in the tokenizer's own chat template: what an assistant is asked, and what it answers.

Many templates write a longer conversation by appending to the shorter one: then it is one text, of which the answers
are learned. Some rewrite earlier answers (Qwen3 leaves out their thoughts): then each answer is a text of its own,
after the prompt that the model would receive for it.
"""

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.text.shapes import Message, Record
from port_agent.finetuning.text.text_encoder import LearnedText

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_MAX_REASON = 200
"""Most characters shown of a template's error."""

_Turn = dict[str, Any]


class UnwrittenError(Exception):
    """The template does not write a conversation faithfully; the text says why."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer within the text that ends with it, and whether the template wrote nothing after it."""

    before: str
    whole: str
    bare: bool


class ConversationWriter:
    """A tokenizer's chat template on one date.

    Counted over all conversations: `ignored`, keys that the template does not read; `greetings`, conversations that
    begin with an answer, which is not learned; `bare`, those that the template ends with nothing; `thoughtless`,
    answers without the thoughts that the template begins.
    """

    def __init__(self, tokenizer: Any, date: datetime.date) -> None:
        self._tokenizer, self._date = tokenizer, date
        self.ignored: Counter[str] = Counter()
        self.greetings = self.bare = self.thoughtless = 0

    @classmethod
    def of(cls, tokenizer: Any, options: FinetuneOptions) -> "ConversationWriter":
        """Return a tokenizer's template on the date of a run."""
        return cls(tokenizer, datetime.date.fromisoformat(options.date) if options.date else datetime.date.today())

    def texts(self, record: Record) -> list[LearnedText]:
        """Return the texts of a conversation, each with its learned spans.

        Raises FinetuneError if the tokenizer has no template, and UnwrittenError if the template does not write the
        contents of these messages.
        """
        if not self._tokenizer.chat_template:
            raise FinetuneError(
                "the tokenizer has no chat template, so `messages` cannot be written as text; give prompt and "
                "completion, or text"
            )
        if not any(message.is_learned for message in record.messages[1:]):
            raise UnwrittenError("its only answer is a greeting that answers no message")
        answers = self._answers(record)
        self.greetings += record.messages[0].is_learned
        self.bare += answers[-1].bare
        spans, whole = [], ""
        for answer in answers:
            if not answer.before.startswith(whole):
                return [_text((one,)) for one in answers]
            spans.append(answer)
            whole = answer.whole
        return [_text(spans)]

    def question(self, text: str) -> str:
        """Return a question in the form in which a model receives it. Raises UnwrittenError."""
        return self._written([{"role": "user", "content": text}], (), asking=True)

    def _answers(self, record: Record) -> list[_Answer]:
        """Return the answers in the first message form in which the template writes all of them.

        Raises UnwrittenError.
        """
        refusals = []
        tried: list[list[_Turn]] = []
        for form in _FORMS:
            turns = [form(message) for message in record.messages]
            if turns in tried:
                continue
            tried.append(turns)
            try:
                answers = [
                    self._answer(turns[: place + 1], message, record.tools)
                    for place, message in enumerate(record.messages)
                    if place and message.is_learned
                ]
            except UnwrittenError as error:
                refusals.append(error)
                continue
            if form is _in_parts and _writes_parts(answers[-1].whole, record):
                break
            self._count_ignored(turns, record.tools)
            last = max(place for place, message in enumerate(record.messages) if message.is_learned)
            self._count_unread(record.messages[:last], answers[-1])
            return answers
        raise refusals[0]

    def _answer(self, turns: list[_Turn], message: Message, tools: Sequence[Any]) -> _Answer:
        before = self._written(turns[:-1], tools, asking=True)
        after = self._written(turns, tools, asking=False)
        head, opens, _ = before.rpartition(_THOUGHT)
        if after.startswith(before):
            whole = after
        elif opens and before.rstrip().endswith(_THOUGHT) and after.startswith(head):
            whole = before + self._behind_thoughts(after[len(head) :], message)
        else:
            raise UnwrittenError("the template's prompt for an answer differs from what it writes before one")
        written = whole[len(before) :]
        missing = next((text for text in _required_texts(message) if text not in written), None)
        if missing is not None:
            raise UnwrittenError(f"the template leaves out part of an answer: {missing[:_MAX_REASON]!r}")
        thoughts = [key for key in _THOUGHT_KEYS if message.more.get(key)]
        if thoughts and str(message.more[thoughts[0]]).strip() not in written:
            self.ignored[thoughts[0]] += 1
        content = message.content.strip()  # some templates strip both ends of it
        return _Answer(before, whole, bare=bool(content) and written.rstrip().endswith(content))

    def _behind_thoughts(self, written: str, message: Message) -> str:
        """Return an answer beginning with its thoughts, which the template has begun; `written` may
        have thoughts of its own.
        """
        if not written.startswith(_THOUGHT):
            return self._thought(message) + written.lstrip("\n")
        thoughts, _, answer = written.removeprefix(_THOUGHT).partition(_THOUGHT_END)
        self.thoughtless += not thoughts.strip()
        return f"{thoughts.lstrip(chr(10))}{_THOUGHT_END}{answer}"

    def _thought(self, message: Message) -> str:
        """Return the closed thoughts of an answer, if the template begins thoughts but
        leaves them out of the answer.
        """
        thought = next((message.more[key] for key in _THOUGHT_KEYS if message.more.get(key)), None)
        if thought is None and _THOUGHT_END in message.content:
            thought = message.content.partition(_THOUGHT_END)[0].replace(_THOUGHT, "", 1)
        self.thoughtless += thought is None
        return f"{str(thought or '').strip(chr(10))}\n{_THOUGHT_END}\n\n"

    def _count_ignored(self, turns: list[_Turn], tools: Sequence[Any]) -> None:
        """Count the keys that do not change the text that the template writes."""
        keys = {key for turn in turns for key in turn} - {"role", "content", *_THOUGHT_KEYS}
        if not keys and not tools:
            return
        whole = self._written(turns, tools, asking=False)
        for key in keys:
            less = [{name: value for name, value in turn.items() if name != key} for turn in turns]
            self.ignored[key] += self._same(whole, less, tools)
        self.ignored["tools"] += bool(tools) and self._same(whole, turns, ())

    def _count_unread(self, messages: Sequence[Message], last: _Answer) -> None:
        """Count, by role, the messages before the last answer that the template leaves out; tool results may
        be written in another form.
        """
        asked = [one for one in messages if one.role not in ("assistant", "tool")]
        for role in {one.role for one in asked if one.content.strip() not in last.whole}:
            self.ignored[f"{role} messages"] += 1

    def _same(self, whole: str, turns: list[_Turn], tools: Sequence[Any]) -> bool:
        try:
            return self._written(turns, tools, asking=False) == whole
        except UnwrittenError:
            return False

    def _written(self, turns: list[_Turn], tools: Sequence[Any], *, asking: bool) -> str:
        from jinja2 import TemplateError  # transformers loads it here; a process that trains never comes here

        try:
            with _on(self._date):
                text: str = self._tokenizer.apply_chat_template(
                    turns, tools=list(tools) or None, tokenize=False, add_generation_prompt=asking
                )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            reason = " ".join(str(error).split())  # a template is third-party code and may raise anything
            raise UnwrittenError(reason[:_MAX_REASON]) from error
        return text


@contextlib.contextmanager
def _on(date: datetime.date) -> Iterator[None]:
    """Make templates see a fixed date.

    By default transformers uses the clock, and it passes only its own function to templates.
    """
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    clock, moment = module.datetime, datetime.datetime.combine(date, datetime.time())
    module.datetime = SimpleNamespace(now=lambda: moment)
    try:
        yield
    finally:
        module.datetime = clock


def _text(answers: Sequence[_Answer]) -> LearnedText:
    spans = tuple((len(answer.before), len(answer.whole)) for answer in answers)
    return LearnedText(answers[-1].whole, spans, begun=False, ended=answers[-1].bare)


def _required_texts(message: Message) -> Iterable[str]:
    """Return the strings that an answer must contain unchanged."""
    calls = [call.get("function", call) for call in message.more.get("tool_calls") or ()]
    return (message.content.rpartition(_THOUGHT_END)[2].strip(), *(str(call.get("name", "")) for call in calls))


# -- forms of a message: templates are written for one or another


def _plain(message: Message) -> _Turn:
    """Return content as text, and arguments of calls as objects, as transformers expects."""
    calls = message.more.get("tool_calls")
    more = {**message.more, **({"tool_calls": [_with_objects(call) for call in calls]} if calls else {})}
    return {"role": message.role, "content": message.content, **more}


def _as_stored(message: Message) -> _Turn:
    """Return arguments of calls as text where they are stored as text, as OpenAI expects."""
    return {"role": message.role, "content": message.content, **message.more}


def _without_content(change: Callable[[Message], _Turn]) -> Callable[[Message], _Turn]:
    """Return messages that only make calls without content."""
    return lambda message: {**change(message), **({} if message.content else {"content": None})}


def _in_parts(message: Message) -> _Turn:
    """Return the content as a list of parts, as vision models expect."""
    return {**_plain(message), "content": [{"type": "text", "text": message.content}]}


def _writes_parts(whole: str, record: Record) -> bool:
    """Return whether a text shows the parts of a message as Python or JSON, which means that the
    template accepts only text.
    """
    contents = f"{[message.content for message in record.messages]}{record.tools}"
    return any(whole.count(mark) > contents.count(mark) for mark in ("'type': 'text'", '"type": "text"'))


_FORMS = (_plain, _as_stored, _without_content(_plain), _without_content(_as_stored), _in_parts)


def _with_objects(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
