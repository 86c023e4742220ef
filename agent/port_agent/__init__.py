"""Trains on the device: follows programs, runs bundles, watches, pages, meters, talks.

`from port_agent import budget` gives any training loop a memory budget; `plan(PlanRequest(...))` makes a bundle of a script, as
`port-agent plan` does. All names are loaded on first use, because the supervisor imports this package and must never import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from port_agent.intercept.budget import Budget, Report, UnsupportedError, budget
    from port_agent.planning.making import PlanReport, plan
    from port_agent.planning.request import PlanRequest, RequestError
    from port_planner.base.errors import PortError
    from port_planner.job import TrainingJob

_HOMES = {
    "Budget": "port_agent.intercept.budget",
    "UnsupportedError": "port_agent.intercept.budget",
    "PlanReport": "port_agent.planning.making",
    "PlanRequest": "port_agent.planning.request",
    "PortError": "port_planner.base.errors",
    "Report": "port_agent.intercept.budget",
    "RequestError": "port_agent.planning.request",
    "TrainingJob": "port_planner.job",
    "budget": "port_agent.intercept.budget",
    "plan": "port_agent.planning.making",
}
"""The public names, and the modules that have them."""

__all__ = [
    "Budget",
    "PlanReport",
    "PlanRequest",
    "PortError",
    "Report",
    "RequestError",
    "TrainingJob",
    "UnsupportedError",
    "budget",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'port_agent' has no attribute {name!r}")
