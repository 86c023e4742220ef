"""Restart a command that computes in its own process with the preloaded allocator, which cannot be loaded later."""

import json
import os
import sys

from port_agent.malloc.environment import PreloadMode, preload_environment, preload_mode

_BEFORE = "PORT_MALLOC_BEFORE"
"""Names the variables as they were, for the processes that the one begun again starts."""


def begin_again_preloaded(limit_bytes: int) -> None:
    """Replace this process by its own command with the allocator preloaded, once; return if it is loaded, or cannot be.

    The command must have done nothing yet. `limit_bytes`: limit of live and cached blocks together.
    """
    before = os.environ.pop(_BEFORE, None)
    if before is not None:
        for name, value in json.loads(before).items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
    elif preload_mode() is PreloadMode.PRELOAD:
        added = preload_environment(limit_bytes)
        words = json.dumps({name: os.environ.get(name) for name in added})
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added, _BEFORE: words})
