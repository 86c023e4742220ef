"""Keep the process that plans within the budget that it plans for: a model that never fitted here is planned here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.follow.budget import budget
from agent.follow.memory import BudgetTooSmallError
from agent.follow.patches import deferred_modules, light_dynamo

_LEAST_TENSOR_BYTES = 32 << 20
"""Of tensors, where this process alone takes the budget: it loads what the worker that trains does not need."""


@contextmanager
def within_budget(ram_bytes: int, page_dir: Path) -> Iterator[None]:
    """Follow what the block does within `ram_bytes` of resident memory; its tensors must not be used afterwards.

    Raises NotFollowedError where something in it cannot be followed, or is followed already, and PageError where
    `page_dir` cannot take pages.
    """
    light_dynamo.hold_place()
    deferred_modules.defer_modules()
    limit = budget(ram=ram_bytes, page_dir=page_dir)
    try:
        limit.start()
    except BudgetTooSmallError:
        limit = budget(tensors=_LEAST_TENSOR_BYTES, page_dir=page_dir).start()
    try:
        yield
    finally:
        limit.stop(restore=False)
