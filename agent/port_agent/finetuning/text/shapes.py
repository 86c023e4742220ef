"""What an entry of a user's data says: the shapes that it may have, by its keys.

A shape is what people have: plain texts, prompts with completions, conversations as OpenAI, ShareGPT and trl write them, instructions as Alpaca does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from port_planner.base.units import shown

_ASSISTANT = "assistant"
_MAX_SHOWN = 60

_ROLES = {
    "human": "user", "user": "user", "gpt": _ASSISTANT, "chatgpt": _ASSISTANT, "assistant": _ASSISTANT, "model": _ASSISTANT,
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""Of ShareGPT, as templates call them."""

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"
"""As Stanford's Alpaca was asked, for tokenizers without a chat template."""

SHAPES = (
    '{"text": ...}, {"text": ..., "label": ...}, {"prompt": ..., "completion": ...}, {"prompt": ..., "chosen": ..., "rejected": ...}, {"messages": [{"role": ..., "content": ...}]}, '
    '{"conversations": [{"from": ..., "value": ...}]} or {"instruction": ..., "input": ..., "output": ...}'
)
"""For people."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. `more`: what a template may read beside them, such as `tool_calls`, `name` and `reasoning_content`."""

    role: str
    content: str
    learned: bool = True
    """Of an assistant's."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_learned(self) -> bool:
        """Whether it is an answer that is learned."""
        return self.role == _ASSISTANT and self.learned


@dataclass(frozen=True, slots=True)
class Record:
    """`text`, a `file` that is a text, `prompt` and `completion`, or `messages`.

    One with messages and a prompt is written as messages where the tokenizer has a template. `tools`: that the assistant may call. `place`: for
    people, where it stands.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    label: str | None = None
    """Of the text; used by models that choose one."""
    file: Path | None = None
    rejected: "Record | None" = None
    """The same with another answer, which this one is preferred to."""
    place: str = field(default="", compare=False)

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.file is not None


Entry = Mapping[str, Any]


def record_of(entry: object, place: str = "") -> tuple[Record, list[str]]:
    """Return what an entry says, and its keys that are not read. Raises ValueError, with what is wrong, for what has no shape or two."""
    if not isinstance(entry, Mapping):
        raise ValueError("no object")
    there = {key: value for key, value in entry.items() if value is not None}
    found = [shape for shape in _SHAPES if all(key in there for key in shape.keys)]
    fitting = [shape for shape in found if not any({*shape.keys} <= {*other.beside} for other in found)]
    if not fitting:
        raise ValueError(
            f"none of the shapes that are read, with the keys {shown(', '.join(map(str, there))[:_MAX_SHOWN])}"
        )
    if len(fitting) > 1:
        raise ValueError(f"both {' and '.join(' with '.join(shape.keys) for shape in fitting[:2])}: give one of them")
    (shape,) = fitting
    return shape.read(there, place), sorted({*there} - {*shape.keys, *shape.beside})


def _text(entry: Entry, place: str) -> Record:
    return Record(text=_string(entry, "text"), label=_label(entry.get("label")), place=place)


def _label(label: object) -> str | None:
    if label is None or isinstance(label, str | int):
        return None if label is None else str(label)
    raise ValueError(f"the label {label!r}: labels are classes, given as texts or whole numbers")


def _prompted(entry: Entry, place: str) -> Record:
    prompt, completion = _parsed(entry["prompt"]), _parsed(entry["completion"])
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = tuple(_message(turn, learned=False) for turn in prompt) + tuple(map(_message, completion))
        return _conversation(messages, entry, place)
    return Record(prompt=_string(entry, "prompt"), completion=_string(entry, "completion"), place=place)


def _preference(entry: Entry, place: str) -> Record:
    """Return the chosen answer of a pair with the rejected one; what both begin with is the prompt where there is none."""
    chosen, rejected = (_answer(entry, key, place) for key in ("chosen", "rejected"))
    if bool(chosen.messages) != bool(rejected.messages):
        raise ValueError("a chosen answer of messages and a rejected one of text, or the other way round")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise ValueError("a chosen and a rejected answer to other messages")
    return replace(chosen, rejected=rejected)


def _answer(entry: Entry, key: str, place: str) -> Record:
    prompt, answer = _parsed(entry.get("prompt") or ()), _parsed(entry[key])
    if isinstance(answer, list):
        if prompt and not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        elif not prompt:
            prompt, answer = answer[:-1], answer[-1:]
        return _prompted({"prompt": list(prompt), "completion": answer, "tools": entry.get("tools")}, place)
    if not isinstance(prompt, str):
        raise ValueError(f"a {key} answer of text without a prompt of text")
    return Record(prompt=prompt, completion=_string(entry, key), place=place)


def _messages(entry: Entry, place: str) -> Record:
    turns = _list(entry, "messages")
    return _conversation(tuple(map(_message, turns)), entry, place)


def _share_gpt(entry: Entry, place: str) -> Record:
    turns = _list(entry, "conversations")
    first = [Message("system", entry["system"])] if isinstance(entry.get("system"), str) and entry["system"] else []
    return _conversation((*first, *(_turn(turn) for turn in turns)), entry, place)


def _turn(turn: object) -> Message:
    """Return a turn of ShareGPT, or one with role and content under its name."""
    if isinstance(turn, Mapping) and "from" in turn:
        said = turn["from"]
        if said not in _ROLES or not isinstance(turn.get("value"), str):
            raise ValueError(f"a turn from {said!r}, which is none of {', '.join(_ROLES)} with a value")
        return _message({"role": _ROLES[said], "content": turn["value"], **_less(turn, "from", "value")})
    return _message(turn)


def _instruction(entry: Entry, place: str) -> Record:
    asked, given, answer = _string(entry, "instruction"), entry.get("input") or "", _string(entry, "output")
    if not isinstance(given, str):
        raise ValueError("an input that is no text")
    system = [Message("system", entry["system"])] if isinstance(entry.get("system"), str) and entry["system"] else []
    whole = f"{asked}\n\n{given}" if given else asked
    prompt = _ALPACA.format(_ALPACA_INPUT if given else "", asked, f"### Input:\n{given}\n\n" if given else "")
    messages = (*system, Message("user", whole), Message(_ASSISTANT, answer))
    return Record(prompt=prompt, completion=answer, messages=messages, place=place)


def _conversation(messages: tuple[Message, ...], entry: Entry, place: str) -> Record:
    if not any(message.is_learned for message in messages):
        raise ValueError("messages without an assistant's that is learned")
    tools = _parsed(entry.get("tools") or ())
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ValueError("tools that are no list")
    return Record(messages=messages, tools=tuple(tools), place=place)


def _message(turn: object, learned: bool = True) -> Message:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise ValueError("a message without role and content")
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, list):
        content = _joined(content)
    if calls and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise ValueError("tool_calls that are no list of objects")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError("a message without role and content")
    weight = turn.get("weight", 1)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise ValueError(f"a message's weight of {weight!r}: 0 or 1")
    more = {key: value for key, value in _less(turn, "role", "content", "weight").items() if value is not None}
    return Message(turn["role"], content, (learned and bool(weight)) or turn["role"] != _ASSISTANT, more)


def _joined(parts: Sequence[object]) -> str:
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a part of a message that is no text")
    return "".join(map(str, texts))


def _less(turn: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in keys}


def _string(entry: Entry, key: str) -> str:
    if not isinstance(entry[key], str):
        raise ValueError(f"a {key} that is no text")
    return str(entry[key])


def _list(entry: Entry, key: str) -> list[object]:
    found = _parsed(entry[key])
    if not isinstance(found, list) or not found:
        raise ValueError(f"{key} that are no list of messages")
    return found


def _parsed(value: Any) -> Any:
    """Return a list of objects that is written as JSON in a text, as tables have it, and all else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, list) and all(isinstance(part, dict) for part in found) else value


@dataclass(frozen=True, slots=True)
class _Shape:
    """The keys that an entry has, those that it may have beside them, and how it is read. Alpaca's own file has each record as a text, too."""

    keys: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[[Entry, str], Record]


_SHAPES = (
    _Shape(("text",), ("label",), _text),
    _Shape(("prompt", "completion"), ("tools",), _prompted),
    _Shape(("chosen", "rejected"), ("prompt", "tools"), _preference),
    _Shape(("messages",), ("tools",), _messages),
    _Shape(("conversations",), ("tools", "system"), _share_gpt),
    _Shape(("instruction", "output"), ("input", "system", "text"), _instruction),
)

COLUMNS = tuple(shape.keys for shape in _SHAPES)
"""Keys that make a shape, by which a table is told."""
