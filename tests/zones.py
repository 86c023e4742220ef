"""The time zone of this process, for as long as a test wants it."""

import contextlib
import time
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def clock_in(zone: str) -> Iterator[None]:
    """Have local time, of this process and those it starts, be that of a zone such as Europe/Berlin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        yield
    time.tzset()
