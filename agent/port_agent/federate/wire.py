"""Flower's messages and client state as bytes, in both directions. Nothing in them is unpickled or run."""

from pathlib import Path
from tokenize import TokenError

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from port_agent.federate.tensors import Arrays
from port_planner.base.errors import ExitCode, PortError

_UNREADABLE = (DecodeError, ValueError, TypeError, KeyError, AttributeError)
"""Exceptions that Flower raises for invalid protocol buffers."""
UNREADABLE_ARRAY = (ValueError, TypeError, EOFError, OSError, SyntaxError, TokenError)
"""Exceptions that reading an array may raise; numpy parses its header as Python."""


class FlowerMessageError(PortError):
    """Bytes that are not a Flower message."""

    exit_code = ExitCode.IMPOSSIBLE


def message_bytes(message: Message) -> bytes:
    """Return the bytes of a message."""
    return bytes(message_to_proto(message).SerializeToString())


def read_message(content: bytes) -> Message:
    """Return the message in `content`; raises FlowerMessageError."""
    try:
        return message_from_proto(MessageProto.FromString(content))
    except _UNREADABLE as error:
        raise FlowerMessageError(f"not a Flower message ({len(content)} bytes): {error}") from error


def flower_records(path: Path) -> RecordDict:
    """Return the records in a file, none if there is no such file; raises FlowerMessageError, OSError."""
    try:
        return recorddict_from_proto(RecordDictProto.FromString(path.read_bytes()))
    except FileNotFoundError:
        return RecordDict()
    except _UNREADABLE as error:
        raise FlowerMessageError(f"{path} holds no Flower records: {error}") from error


def records_bytes(records: RecordDict) -> bytes:
    """Return the bytes of records."""
    return bytes(recorddict_to_proto(records).SerializeToString())


def array_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays in Flower's form."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def plain_arrays(record: ArrayRecord) -> Arrays:
    """Return the arrays of a record; raises FlowerMessageError for an invalid one."""
    try:
        found: dict[str, NDArray[np.generic]] = {name: array.numpy() for name, array in record.items()}
    except UNREADABLE_ARRAY as error:
        raise FlowerMessageError(f"an array cannot be read: {error}") from error
    return found
