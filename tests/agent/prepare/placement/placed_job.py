"""A small job with a short last batch and evaluation, and made-up tables of what its operators take on a CPU
and on the simulated device.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from port_agent.prepare.placement.divide import Links
from port_agent.prepare.reference import compared_steps, with_expected_results
from port_planner import make_bundle
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.ir.graph import Phase, StepGraph
from port_planner.job import Bucket, TrainingJob
from port_planner.make_bundle import CapturedJob
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.search.placement.operator_devices import DeviceLink

torch.set_num_threads(1)

LINKS = Links(DeviceLink(1e-5, 1e-9), DeviceLink(2e-5, 2e-9))
WORKSPACE = 1000
HOST_BYTES = 100 << 20
PRODUCTS = ("convolution", "convolution_backward", "addmm", "mm")


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def captured_job(accumulate: int = 1, further: int = 0) -> CapturedJob:
    """Return the job on the CPU, recorded and followed until every kind of step was seen; `further`: so many
    samples of another shape, too.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(96, 5),
    )
    data = [torch.randn(10, 3, 8, 8), torch.randint(0, 5, (10,))]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job = TrainingJob(
        model,
        loss,
        optimizer,
        data,
        4,
        accumulate=accumulate,
        eval_data=[column[:5] for column in data],
        drop_last=accumulate > 1,
        buckets=[Bucket([torch.randn(further, 3, 8, 8), torch.randint(0, 5, (further,))], 3)] if further else [],
    )
    steps = compared_steps(job)
    return with_expected_results(make_bundle.prepare(job, followed=steps), steps)


def _cost(graph: StepGraph, i: int, *, device: bool) -> OpCost:
    product = graph.ops[i].name.removeprefix("aten::").partition(".")[0] in PRODUCTS
    update = graph.ops[i].phase is Phase.UPDATE
    on_device = 2e-5 if product else 1e-5 if update else 1e-4
    return OpCost(on_device if device else 1e-3 if product else 2e-5, WORKSPACE, 0.0)


def tables(captured: CapturedJob, absent: tuple[str, ...] = ()) -> tuple[MeasuredCosts, MeasuredCosts]:
    """Return what operators take: products on the CPU a millisecond, updates less on the device, all else there more;
    `absent`: names that the device lacks.
    """
    on_cpu, on_device = (
        MeasuredCosts(
            tuple(tuple(_cost(g, i, device=device) for i in range(len(g.ops))) for g in captured.graphs.values()), 0, 0
        )
        for device in (False, True)
    )
    lacking = tuple(
        tuple(i for i, op in enumerate(g.ops) if op.name.removeprefix("aten::").partition(".")[0] in absent)
        for g in captured.graphs.values()
    )
    return on_cpu, replace(on_device, absent=lacking)


def device_costs() -> DeviceCosts:
    """Return a device with its own memory, the host's as a target."""
    card = Flash("card", 1e8, 5e7, 1e-4, 1e-9, 1e-9)
    host = Flash("host memory", 1e10, 1e10, 1e-6, 1e-11, 1e-11, capacity_bytes=HOST_BYTES)
    return DeviceCosts("test", 0, 1.0, 1.0, card, scratch_targets=(host,))
