"""Every shape that people's entries have is read as what it says, and what has two shapes or none
is refused with the reason.
"""

from typing import Any

import pytest

from port_agent.finetuning.text.shapes import Message, Record, record_of

USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
TALK = (Message("user", "u"), Message("assistant", "a"))


@pytest.mark.parametrize(
    ("entry", "record"),
    [
        ({"text": "a"}, Record(text="a")),
        ({"text": "a", "label": 3}, Record(text="a", label="3")),
        ({"text": "a", "label": None}, Record(text="a")),
        ({"prompt": "p", "completion": "c"}, Record(prompt="p", completion="c")),
        ({"prompt": "[1]", "completion": "[2]"}, Record(prompt="[1]", completion="[2]")),
        ({"messages": [USER, ANSWER]}, Record(messages=TALK)),
        ({"messages": '[{"role": "user", "content": "u"}, {"role": "assistant", '
        '"content": "a"}]'}, Record(messages=TALK)),
        ({"messages": [USER, ANSWER], "tools": [{"x": 1}]}, Record(messages=TALK, tools=({"x": 1},))),
        ({"messages": [USER, ANSWER], "tools": '[{"x": 1}]'}, Record(messages=TALK, tools=({"x": 1},))),
        ({"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}, Record(messages=TALK)),
        ({"conversations": [USER, ANSWER], "system": "s"}, Record(messages=(Message("system", "s"), *TALK))),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, Record(messages=(TALK[0], Message("assistant", "a", learned=False), *TALK))),
        *(
            ({"messages": [USER, {**ANSWER, mark: no}, {**ANSWER, mark: yes}]}, Record(messages=(TALK[0], Message("assistant", "a", learned=False), TALK[1])))
            for mark, no, yes in (("weight", 0, 1), ("train", False, True), ("loss", False, None))
        ),
    ],
)  # fmt: skip
def test_an_entry_of_each_shape(entry: dict[str, Any], record: Record) -> None:
    assert record_of(entry) == (record, [])


def test_functions_are_tools() -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "r"}
    record, unread = record_of({"messages": [USER, called, result, ANSWER], "functions": [{"name": "f"}]})
    _, call, said, _ = record.messages
    assert call.more == {"tool_calls": [{"type": "function", "function": called["function_call"]}]} and not call.content
    assert (said.role, said.more) == ("tool", {"name": "f"}) and not unread
    assert record.tools == ({"type": "function", "function": {"name": "f"}},)


def test_an_instruction_is_a_conversation_and_a_prompt() -> None:
    record, unread = record_of({"instruction": "i", "input": "x", "output": "o", "text": "all", "id": 3})
    assert [m.content for m in record.messages] == ["i\n\nx", "o"] and unread == ["id"]
    assert record.prompt is not None and record.prompt.endswith(
        "### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n"
    )
    assert record.completion == "o"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ([], "not a JSON object"),
        ({"words": 1}, "not a known shape of record; its keys are 'words'"),
        ({"text": "a", "prompt": "p", "completion": "c"}, "both text and prompt with completion: give one"),
        ({"text": "a", "label": 0.5}, "the label 0.5 is not valid"),
        ({"text": 3}, "the text is not text"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": [USER]}, "no message of an assistant is learned"),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no message of an assistant is learned"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "weight 0.5"),
        ({"messages": [{"role": "user", "content": None}, ANSWER]}, "a message has no role or no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
            "a part of a message is not text",
        ),
        ({"messages": [USER, {**ANSWER, "tool_calls": "x"}]}, "tool_calls is not a list of objects"),
        ({"messages": [USER, ANSWER], "tools": "x"}, "tools or functions is not a list"),
        ({"messages": [USER, {**ANSWER, "function_call": "x"}]}, "a function_call is not an object"),
        ({"prompt": "p", "completion": "c", "label": True}, "the label True says whether the completion is good"),
        ({"prompt": "p", "completion": "c", "label": "false"}, "the label 'false' says whether"),
        ({"prompt": [USER], "completion": [ANSWER], "label": False}, "the label False says whether"),
        ({"conversations": [{"from": "dog", "value": "u"}]}, "a turn from 'dog'"),
        ({"instruction": "i", "input": 3, "output": "o"}, "the input is not text"),
    ],
)
def test_what_is_wrong_with_an_entry_is_said(entry: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        record_of(entry)


def test_a_pair_of_answers_is_the_preferred_one_with_the_other() -> None:
    record, unread = record_of({"prompt": "a", "chosen": " b", "rejected": " c", "margin": 2})
    assert (record.prompt, record.completion, unread) == ("a", " b", ["margin"])
    assert record.rejected is not None and (record.rejected.prompt, record.rejected.completion) == ("a", " c")
    asked, good, bad = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    )
    apart = {"prompt": [asked], "chosen": [good], "rejected": [bad]}
    whole = {"chosen": [asked, good], "rejected": [asked, bad]}
    mixed = {"prompt": "a", "chosen": [good], "rejected": [bad]}
    prompt_twice = (
        {**whole, "prompt": "a"},
        {**whole, "prompt": [asked]},
        {**whole, "prompt": "a", "messages": [asked, good]},
    )
    system = {"role": "system", "content": "s"}
    named = record_of({"prompt": "a", "chosen": [system, asked, good], "rejected": [system, asked, bad]})[0]
    assert [message.content for message in named.messages] == ["s", "a", "b"]
    found = [record_of(entry)[0] for entry in (apart, whole, mixed, *prompt_twice)]
    assert all(one == found[0] for one in found) and found[0].rejected is not None
    assert [message.content for message in found[0].messages] == ["a", "b"]
    assert [message.content for message in found[0].rejected.messages] == ["a", "c"]


def test_the_prompt_of_two_whole_texts_is_their_common_beginning() -> None:
    record, _ = record_of({"chosen": "Human: a\n\nAssistant: be", "rejected": "Human: a\n\nAssistant: or"})
    assert record.rejected is not None and record.prompt == record.rejected.prompt == "Human: a\n\nAssistant:"
    assert (record.completion, record.rejected.completion) == (" be", " or")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"prompt": [USER], "chosen": "b", "rejected": "c"}, "a chosen answer as text needs a prompt as text"),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "c"}]}, "or the other way round"),
        (
            {
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}],
            },
            "to different messages",
        ),
    ],
)
def test_pairs_that_are_none_are_refused(entry: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        record_of(entry)
