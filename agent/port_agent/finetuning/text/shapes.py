"""The meaning of an entry of a user's data: its possible shapes, recognised by its keys.

The shapes are common ones: plain texts, prompts with completions, conversations as OpenAI, ShareGPT and trl write them,
instructions as in Alpaca.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from port_planner.base.units import shown

_ASSISTANT = "assistant"
_MAX_SHOWN = 60

_ROLES = {
    "human": "user", "user": "user", "gpt": _ASSISTANT, "chatgpt": _ASSISTANT, "assistant": _ASSISTANT, "model": _ASSISTANT,
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
"""ShareGPT's roles, by the names that templates use."""

_LEARNED_MARKS = ("train", "loss")
"""Keys by which Axolotl and others mark whether a message is learned, besides OpenAI's `weight`."""

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
_ALPACA_INPUT = ", paired with an input that provides further context"
"""The prompt of Stanford's Alpaca, for tokenizers without a chat template."""

_VERDICTS = ("true", "false", "0", "1")
"""Labels, in lower case, by which trl's KTO marks whether a completion is good."""

SHAPES = (
    '{"text": ...}, {"text": ..., "label": ...}, {"prompt": ..., "completion": ...}, {"prompt": ..., "chosen": ..., '
    '"rejected": ...}, {"messages": [{"role": ..., "content": ...}]}, {"conversations": [{"from": ..., "value": ...}]} '
    'or {"instruction": ..., "input": ..., "output": ...}'
)
"""Accepted keys of a record, as shown to people."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    `more`: other keys that a template may read, such as `tool_calls`, `name` and `reasoning_content`.
    """

    role: str
    content: str
    learned: bool = True
    """Whether an assistant's message is learned."""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_learned(self) -> bool:
        """Whether it is an answer that is learned."""
        return self.role == _ASSISTANT and self.learned


@dataclass(frozen=True, slots=True)
class Record:
    """`text`, a `file` that is a text, `prompt` and `completion`, or `messages`.

    A record with messages and a prompt is written as messages if the tokenizer has a template. `tools`: the tools that
    the assistant may call. `place`: its location in the data, for people.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    label: str | None = None
    """Label of the text, for models that choose one."""
    file: Path | None = None
    rejected: "Record | None" = None
    """The same record with the answer that was not preferred."""
    place: str = field(default="", compare=False)

    @property
    def is_text(self) -> bool:
        return self.text is not None or self.file is not None


Entry = Mapping[str, Any]


def record_of(entry: object, place: str = "") -> tuple[Record, list[str]]:
    """Return the record of an entry, and its unused keys.

    Raises ValueError, with the reason, if it has no shape or two shapes.
    """
    if not isinstance(entry, Mapping):
        raise ValueError("not a JSON object")
    there = {key: value for key, value in entry.items() if value is not None}
    found = [shape for shape in _SHAPES if all(key in there for key in shape.keys)]
    fitting = [shape for shape in found if not any({*shape.keys} <= {*other.beside} for other in found)]
    if not fitting:
        raise ValueError(f"not a known shape of record; its keys are {shown(', '.join(map(str, there))[:_MAX_SHOWN])}")
    if len(fitting) > 1:
        raise ValueError(
            f"the keys of both {' and '.join(' with '.join(shape.keys) for shape in fitting[:2])}: give one of them"
        )
    (shape,) = fitting
    return shape.read(there, place), sorted({*there} - {*shape.keys, *shape.beside})


def _text(entry: Entry, place: str) -> Record:
    return Record(text=_string(entry, "text"), label=_label(entry.get("label")), place=place)


def _label(label: object) -> str | None:
    if label is None or isinstance(label, str | int):
        return None if label is None else str(label)
    raise ValueError(f"the label {label!r} is not valid; give classes as texts or whole numbers")


def _prompted(entry: Entry, place: str) -> Record:
    if str(entry.get("label")).lower() in _VERDICTS:
        raise ValueError(
            f"the label {entry['label']!r} says whether the completion is good (KTO), which is not learned here; give "
            "the good ones without label, or pairs of chosen and rejected"
        )
    prompt, completion = _parsed(entry["prompt"]), _parsed(entry["completion"])
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = tuple(_message(turn, learned=False) for turn in prompt) + tuple(map(_message, completion))
        return _conversation(messages, entry, place)
    return Record(prompt=_string(entry, "prompt"), completion=_string(entry, "completion"), place=place)


def _preference(entry: Entry, place: str) -> Record:
    """Return the chosen answer of a pair together with the rejected one.

    If there is no prompt, their common beginning is the prompt.
    """
    entry = _with_prompt(entry)
    chosen, rejected = (_answer(entry, key, place) for key in ("chosen", "rejected"))
    if bool(chosen.messages) != bool(rejected.messages):
        raise ValueError("the chosen answer is messages and the rejected one text, or the other way round")
    if chosen.messages[:-1] != rejected.messages[:-1]:
        raise ValueError("the chosen and the rejected answer belong to different messages")
    return replace(chosen, rejected=rejected)


def _answer(entry: Entry, key: str, place: str) -> Record:
    prompt, answer = _parsed(entry.get("prompt") or ()), _parsed(entry[key])
    if isinstance(answer, list):
        if prompt and not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        asked, answer = _apart(list(prompt), answer)
        return _prompted({"prompt": asked, "completion": answer, "tools": entry.get("tools")}, place)
    if not isinstance(prompt, str):
        raise ValueError(f"a {key} answer as text needs a prompt as text")
    return Record(prompt=prompt, completion=_string(entry, key), place=place)


def _apart(prompt: list[Any], answer: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages of a prompt and of an answer, which may begin with those of the prompt."""
    asked, given, count = _roles_and_contents(prompt), _roles_and_contents(answer), len(prompt)
    if count and given[:count] == asked:
        return answer[:count], answer[count:]
    if not count or given[-1 - count : -1] == asked:
        return answer[:-1], answer[-1:]
    return prompt, answer


def _roles_and_contents(turns: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(turn.get("role"), turn.get("content")) for turn in turns if isinstance(turn, Mapping)]


def _with_prompt(entry: Entry) -> Entry:
    """Return a pair of texts without a prompt as answers to their common beginning, without a
    space at its end, as in trl.
    """
    chosen, rejected = entry["chosen"], entry["rejected"]
    if entry.get("prompt") or not (isinstance(chosen, str) and isinstance(rejected, str)):
        return entry
    both = takewhile(lambda letters: letters[0] == letters[1], zip(chosen, rejected, strict=False))
    prompt = "".join(letter for letter, _ in both).removesuffix(" ")
    return {**entry, "prompt": prompt, "chosen": chosen[len(prompt) :], "rejected": rejected[len(prompt) :]}


def _messages(entry: Entry, place: str) -> Record:
    turns = _list(entry, "messages")
    return _conversation(tuple(map(_message, turns)), entry, place)


def _share_gpt(entry: Entry, place: str) -> Record:
    turns = _list(entry, "conversations")
    first = [Message("system", entry["system"])] if isinstance(entry.get("system"), str) and entry["system"] else []
    return _conversation((*first, *(_turn(turn) for turn in turns)), entry, place)


def _turn(turn: object) -> Message:
    """Return a turn of ShareGPT, or one with role and content under ShareGPT's key."""
    if isinstance(turn, Mapping) and "from" in turn:
        speaker = turn["from"]
        if speaker not in _ROLES or not isinstance(turn.get("value"), str):
            raise ValueError(f"a turn from {speaker!r} is not valid; give {', '.join(_ROLES)}, with a value")
        return _message({"role": _ROLES[speaker], "content": turn["value"], **_less(turn, "from", "value")})
    return _message(turn)


def _instruction(entry: Entry, place: str) -> Record:
    asked, given, answer = _string(entry, "instruction"), entry.get("input") or "", _string(entry, "output")
    if not isinstance(given, str):
        raise ValueError("the input is not text")
    system = [Message("system", entry["system"])] if isinstance(entry.get("system"), str) and entry["system"] else []
    whole = f"{asked}\n\n{given}" if given else asked
    prompt = _ALPACA.format(_ALPACA_INPUT if given else "", asked, f"### Input:\n{given}\n\n" if given else "")
    messages = (*system, Message("user", whole), Message(_ASSISTANT, answer))
    return Record(prompt=prompt, completion=answer, messages=messages, place=place)


def _conversation(messages: tuple[Message, ...], entry: Entry, place: str) -> Record:
    if not any(message.is_learned for message in messages):
        raise ValueError("no message of an assistant is learned")
    tools, functions = (_parsed(entry.get(key) or ()) for key in ("tools", "functions"))
    if any(not isinstance(listed, Sequence) or isinstance(listed, str) for listed in (tools, functions)):
        raise ValueError("tools or functions is not a list")
    tools = (*tools, *({"type": "function", "function": function} for function in functions))
    return Record(messages=messages, tools=tools, place=place)


def _message(turn: object, learned: bool = True) -> Message:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        raise ValueError("a message has no role or no content")
    turn = _with_tools(turn)
    content, calls = turn.get("content"), turn.get("tool_calls")
    if isinstance(content, list):
        content = _joined(content)
    if calls and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise ValueError("tool_calls is not a list of objects")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError("a message has no role or no content")
    weight = turn.get("weight", 1)
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise ValueError(f"a message has the weight {weight!r}, which is not 0 or 1")
    marks = [key for key in _LEARNED_MARKS if isinstance(turn.get(key), bool)]
    learned = learned and bool(weight) and all(turn[key] for key in marks)
    more = {key: value for key, value in _less(turn, "role", "content", "weight", *marks).items() if value is not None}
    return Message(turn["role"], content, learned or turn["role"] != _ASSISTANT, more)


def _with_tools(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a turn with tools where it has functions, OpenAI's earlier format; other turns unchanged."""
    if turn["role"] == "function":
        turn = {**turn, "role": "tool"}
    call = turn.get("function_call")
    if call is None:
        return turn
    if not isinstance(call, Mapping) or turn.get("tool_calls"):
        raise ValueError("a function_call is not an object, or there are tool_calls besides")
    return {**_less(turn, "function_call"), "tool_calls": [{"type": "function", "function": call}]}


def _joined(parts: Sequence[object]) -> str:
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a part of a message is not text")
    return "".join(map(str, texts))


def _less(turn: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in turn.items() if key not in keys}


def _string(entry: Entry, key: str) -> str:
    if not isinstance(entry[key], str):
        raise ValueError(f"the {key} is not text")
    return str(entry[key])


def _list(entry: Entry, key: str) -> list[object]:
    found = _parsed(entry[key])
    if not isinstance(found, list) or not found:
        raise ValueError(f"{key} is not a list of messages")
    return found


def _parsed(value: Any) -> Any:
    """Return the parsed list if the value is a list of objects written as JSON text, as in tables;
    otherwise the value itself.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, list) and all(isinstance(part, dict) for part in found) else value


@dataclass(frozen=True, slots=True)
class _Shape:
    """The required and optional keys of an entry, and its reader. Alpaca's own file also has each
    record as a text, and UltraFeedback's each chosen answer as messages."""

    keys: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[[Entry, str], Record]


_SHAPES = (
    _Shape(("text",), ("label",), _text),
    _Shape(("prompt", "completion"), ("tools",), _prompted),
    _Shape(("chosen", "rejected"), ("prompt", "tools", "messages"), _preference),
    _Shape(("messages",), ("tools", "functions"), _messages),
    _Shape(("conversations",), ("tools", "system"), _share_gpt),
    _Shape(("instruction", "output"), ("input", "system", "text"), _instruction),
)

COLUMNS = tuple(shape.keys for shape in _SHAPES)
"""Sets of keys that make a shape, by which a table is recognised."""
