"""Runs training bundles on the device: watches, pages, meters, talks.

`from agent import budgeted_step` is the drop-in for an existing training loop. It is loaded on first use, because
the supervisor imports this package and must never import torch.
"""

from typing import Any

__all__ = ["budgeted_step"]


def __getattr__(name: str) -> Any:
    if name == "budgeted_step":
        from agent.dropin.budgeted_step import budgeted_step

        return budgeted_step
    raise AttributeError(f"module 'agent' has no attribute {name!r}")
