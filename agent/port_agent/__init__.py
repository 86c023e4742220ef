"""Training on the device: programs within a memory budget, bundles, and a service that watches,
meters and talks to others.

`from port_agent import budget` gives any training loop a memory budget; `plan(PlanRequest(...))` makes a bundle
of a script, `train(TrainRequest(...))` trains it, `finetune(FinetuneRequest(...))` fine-tunes a language model:
as the commands of these names do. All names are loaded on first use, because the supervisor imports this package
and must never import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
    from port_agent.foreground.finetune import FinetuneRequest, finetune
    from port_agent.foreground.run import TrainingFailedError, TrainReport
    from port_agent.foreground.train import TrainRequest, train
    from port_agent.intercept.budget import Budget, Report, UnsupportedError, budget
    from port_agent.planning.plan_making import PlanReport, plan
    from port_agent.planning.request import PlanRequest, RequestError
    from port_planner.base.errors import PortError
    from port_planner.job import TrainingJob

_HOMES = {
    "Budget": "port_agent.intercept.budget",
    "FinetuneError": "port_agent.finetuning.inputs.options",
    "FinetuneOptions": "port_agent.finetuning.inputs.options",
    "FinetuneRequest": "port_agent.foreground.finetune",
    "PlanReport": "port_agent.planning.plan_making",
    "PlanRequest": "port_agent.planning.request",
    "PortError": "port_planner.base.errors",
    "Report": "port_agent.intercept.budget",
    "RequestError": "port_agent.planning.request",
    "TrainReport": "port_agent.foreground.run",
    "TrainRequest": "port_agent.foreground.train",
    "TrainingFailedError": "port_agent.foreground.run",
    "TrainingJob": "port_planner.job",
    "UnsupportedError": "port_agent.intercept.budget",
    "budget": "port_agent.intercept.budget",
    "finetune": "port_agent.foreground.finetune",
    "plan": "port_agent.planning.plan_making",
    "train": "port_agent.foreground.train",
}
"""The public names, and the modules that have them."""

__all__ = [
    "Budget",
    "FinetuneError",
    "FinetuneOptions",
    "FinetuneRequest",
    "PlanReport",
    "PlanRequest",
    "PortError",
    "Report",
    "RequestError",
    "TrainReport",
    "TrainRequest",
    "TrainingFailedError",
    "TrainingJob",
    "UnsupportedError",
    "budget",
    "finetune",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'port_agent' has no attribute {name!r}")
