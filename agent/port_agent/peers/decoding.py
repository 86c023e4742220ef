"""Encoding and decoding of messages between devices as MessagePack.

All faults of received bytes become one kind of error.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

REASON_LIMIT = 200
LONGEST_ROUND_S = 30 * 86400.0
"""Longest round of a federation, in seconds."""
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LIMIT)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]
Token = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}\\Z")]
"""128 random bits as text."""
_FOLDERS = re.compile(r"(?<![\w.])/(?=\S)(?:[^/\n'\"]*[^/\s'\"]/)+")
"""Pattern of the folders of an absolute path, up to its last slash, including spaces."""


def public_reason(error: Exception) -> str:
    """Return an error in a form for another device, with only the last name of an absolute path."""
    text = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
    return _FOLDERS.sub("", text)[:REASON_LIMIT]


class PeerCodec(Generic[T]):
    """Messages of one kind, a struct or a union of structs."""

    def __init__(self, kind: Any, refused: Callable[[str], Exception], what: str) -> None:
        """`refused` creates an error from the reason why bytes are not a message; `what` is
        the beginning of its text.
        """
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._refused, self._what = refused, what

    def encode(self, message: T) -> bytes:
        """Return the bytes of a message."""
        return msgspec.msgpack.encode(message)

    def decode(self, content: bytes) -> T:
        """Decode a message; raises the error of this kind for anything else."""
        try:
            return self._decoder.decode(content)
        except (
            msgspec.MsgspecError,
            RecursionError,
            UnicodeDecodeError,
        ) as error:  # deep nesting, text that is not UTF-8
            raise self._refused(f"{self._what} ({len(content)} bytes): {error}") from error
