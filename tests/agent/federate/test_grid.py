"""The grid sends by lines and takes replies that come for what was asked, in the name of who was asked."""

import io
import json
import queue
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.grid import GridClosedError, PeerGrid
from port_agent.federate.wire import message_bytes


class Lines:
    """Standard input whose lines come when they are put."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue()

    def put(self, **said: object) -> None:
        self._lines.put(json.dumps(said) + "\n")

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        return self._lines.get()


def message(node: int) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"a": 1})}), node, "train")


def test_replies_are_taken_from_who_was_asked_for_what_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    received, said = Lines(), io.StringIO()
    monkeypatch.setattr("sys.stdin", received)
    monkeypatch.setattr("sys.stdout", said)
    grid = PeerGrid(7, [5, 6, 8], 3, tmp_path, lambda asked, reply: None)
    own, foreign = (message_bytes(Message(RecordDict(), reply_to=message(node))) for node in (5, 5))
    TaskIdentity.task_id = 2
    late = message_bytes(Message(RecordDict(), reply_to=message(8)))
    TaskIdentity.task_id = 3
    (tmp_path / "late").write_bytes(late)
    (tmp_path / "own").write_bytes(own)
    (tmp_path / "foreign").write_bytes(foreign)
    received.put(node=5, file="5-99", reply=str(tmp_path / "own"))  # to a message of an earlier round
    received.put(node=6, file="6-2", reply=str(tmp_path / "foreign"))
    received.put(node=8, file="8-3", reply=str(tmp_path / "late"))  # what the same device said in another round
    received.put(node=5, file="5-1", reply=str(tmp_path / "own"))
    received.put(node=5, file="5-1", reply=str(tmp_path / "own"))  # twice
    replies = grid.send_and_receive([message(5), message(6), message(8)], timeout=5.0)
    assert [reply.metadata.src_node_id for reply in replies] == [5]
    assert grid.lost == {6: "it claims to come from node 5", 8: "it replies to a message of another round"}
    lines = [json.loads(line) for line in said.getvalue().splitlines()]
    assert lines == [
        {"event": "send", "node": 5, "file": "5-1"},
        {"event": "send", "node": 6, "file": "6-2"},
        {"event": "send", "node": 8, "file": "8-3"},
        {"event": "forget", "nodes": []},
    ]
    with pytest.raises(NotImplementedError):
        grid.push_messages([])


def test_a_round_ends_when_its_agent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdout", io.StringIO())
    grid = PeerGrid(7, [5], 1, tmp_path, lambda asked, reply: None)
    with pytest.raises(GridClosedError, match="it starts this round again"):
        grid.send_and_receive([message(5)])
