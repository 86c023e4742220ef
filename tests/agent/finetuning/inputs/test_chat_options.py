"""Options of a conversation go from one process to the other as JSON."""

import msgspec

from port_agent.finetuning.inputs.chat_options import ChatOptions


def test_options_come_back_as_they_were() -> None:
    asked = ChatOptions("/m", "/a", "be brief", 7, greedy=True, seed=3)
    assert msgspec.json.decode(msgspec.json.encode(asked), type=ChatOptions) == asked
