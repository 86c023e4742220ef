"""Trains on the device: follows programs, runs bundles, watches, pages, meters, talks.

`from port_agent import budget` gives any training loop a memory budget. It is loaded on first use, because the supervisor
imports this package and must never import torch.
"""

from typing import Any

__all__ = ["budget"]


def __getattr__(name: str) -> Any:
    if name == "budget":
        from port_agent.follow.budget import budget

        return budget
    raise AttributeError(f"module 'port_agent' has no attribute {name!r}")
