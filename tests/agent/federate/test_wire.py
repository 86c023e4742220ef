"""Flower's messages as bytes: as they went, or refused."""

import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.wire import (
    FlowerMessageError,
    array_record,
    flower_records,
    message_bytes,
    plain_arrays,
    read_message,
    records_bytes,
)


def message() -> Message:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    arrays = array_record({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    return Message(RecordDict({"arrays": arrays, "config": ConfigRecord({"a": 1})}), 5, "train")


def test_a_message_comes_as_it_went() -> None:
    back = read_message(message_bytes(message()))
    assert back.metadata.dst_node_id == 5 and back.content["config"]["a"] == 1
    assert np.array_equal(plain_arrays(back.content.array_records["arrays"])["w"], np.arange(6).reshape(2, 3))


@pytest.mark.slow
def test_fuzzed_messages_are_read_or_refused() -> None:
    numbers, good = random.Random(2), message_bytes(message())
    for _ in range(3000):
        content = bytearray(good)
        for _ in range(numbers.randrange(1, 5)):
            content[numbers.randrange(len(content))] = numbers.randrange(256)
        try:
            for record in read_message(bytes(content)).content.array_records.values():
                plain_arrays(record)
        except (FlowerMessageError, ValueError):  # ValueError: a message without content
            continue


def test_records_are_kept_and_none_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "context").write_bytes(records_bytes(message().content))
    assert flower_records(tmp_path / "context")["config"]["a"] == 1
    assert list(flower_records(tmp_path / "none")) == []
    (tmp_path / "junk").write_bytes(b"\xff\xff\xff")
    with pytest.raises(FlowerMessageError, match="holds no Flower records"):
        flower_records(tmp_path / "junk")
