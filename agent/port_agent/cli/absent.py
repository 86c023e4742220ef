"""Modules that the agent must not load: others import them, and the agent would keep them in memory for months."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def absent(*names: str) -> Iterator[None]:
    """Make imports of modules of these names fail within the block, unless they are already loaded."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden, None))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
