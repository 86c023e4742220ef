"""What an operator takes of a device's memory beyond what it returns, by torch's own count there."""

import pytest
import torch

from port_planner.capture.step import capture_step
from port_planner.profiling.device_memory import DeviceWorkspaceMeter
from port_planner.profiling.operator_profile import profile_operators
from tests.planner.small_classifier import batch, classify, net, sgd
from tests.simulated_device import NAME, SimBackend

pytestmark = pytest.mark.own_process


def test_what_is_taken_in_between_is_seen_and_what_is_returned_is_not() -> None:
    SimBackend()
    meter = DeviceWorkspaceMeter(NAME)
    assert meter.sees and not DeviceWorkspaceMeter("cpu").sees
    meter.start()
    large = torch.ones(1000, device=NAME)
    kept = large[:10].clone()
    del large
    assert meter.stop() == 4000 and kept.numel() == 10


def test_operators_of_a_captured_step_are_measured_where_they_run() -> None:
    SimBackend()
    model = net().to(NAME)
    graph = capture_step(model, classify, sgd(model), tuple(t.to(NAME) for t in batch())).graphs["step"]
    (table,) = profile_operators((graph,), compute_watts=1.0).ops
    assert len(table) == len(graph.ops) and all(cost.seconds >= 0 for cost in table)
    assert graph.device == NAME
