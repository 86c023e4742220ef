"""Bytes from another device as typed values: whatever is wrong with them is one error."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def decoded(decoder: "msgspec.msgpack.Decoder[T]", content: bytes, refused: Callable[[str], Exception], what: str) -> T:
    """Return the value that `content` is; raises what `refused` makes of the reason, of which `what` is the beginning."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:  # a deep nest, a text that is no UTF-8
        raise refused(f"{what} ({len(content)} bytes): {error}") from error
