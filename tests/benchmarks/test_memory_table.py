"""The table of ways to train: computed figures follow from shapes, every pass saves, bands save most."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.mcu_accuracy import STOCHASTIC_ALL, STOCHASTIC_SPARSE, Row
from benchmarks.mcu_networks.memory_table import (
    Network,
    memory_table,
    network_rows,
    pytorch_bytes,
    tflite_bytes,
    with_accuracy,
)
from benchmarks.mcu_networks.schemes import last_five
from port_planner.mcu.frontend import import_module
from port_planner.mcu.zoo import DigitsNet


def test_what_autograd_saves_is_counted_once_and_parameters_twice() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 4, bias=False))
    parameters, inputs, log_softmax, labels = 4 * 32, 4 * 8, 4 * 4, 8
    reduced = 4  # the mean's weight of one sample
    assert pytorch_bytes(module, (8,)) == pytest.approx(2 * parameters + inputs + log_softmax + labels + reduced, abs=4)


def test_a_fused_graph_takes_its_outputs_and_twice_its_parameters() -> None:
    graph = import_module(nn.Sequential(nn.Flatten(), nn.Linear(8, 4)).eval(), (1, 2, 4))
    assert tflite_bytes(graph) == 4 * (8 + 4 + 2 * (8 * 4 + 4) + 12)


@pytest.mark.slow
def test_every_way_takes_less_than_the_one_before_and_only_bands_cost_energy() -> None:
    torch.manual_seed(0)
    rows = network_rows(Network("digits", "digits", DigitsNet(), (1, 8, 8), last_five, "mkr1000"))
    sizes = {row.way.split(" (")[0]: row.ram_bytes for row in rows}
    assert sizes["full, fp32, PyTorch"] > sizes["full, fp32, fused as in TF-Lite"] > sizes["full, int8, in place"]
    assert sizes["full, int8, all gradients first"] > sizes["full, int8, in place"] > sizes["sparse, int8, in place"]
    assert sizes["sparse, int8, all gradients first"] > sizes["sparse, int8, in place"]
    bands = [row for row in rows if "bands" in row.way]
    assert all(row.overhead is not None and row.overhead > 0 for row in bands)
    assert max(row.ram_bytes for row in bands) < sizes["full, int8, in place"]
    pages = [row for row in rows if "pages" in row.way]
    assert min(row.ram_bytes for row in pages) < min(row.ram_bytes for row in bands)
    assert memory_table(rows).row_count == len(rows)
    measured = [Row("digits", name, 0.03, at, 1.0, at - 80.0, 0.5, 3) for name, at in LEARNT.items()]
    learnt = with_accuracy(rows, measured)
    assert {row.accuracy.accuracy for row in learnt if row.accuracy and "pages" in row.way} == {79.0}
    assert [row.accuracy.accuracy for row in learnt if row.accuracy and "fp32" in row.way] == [80.0, 80.0]
    assert memory_table(learnt).columns[-1].header == "vs fp32"


LEARNT = {"fp32, all layers": 80.0, STOCHASTIC_ALL: 79.0, STOCHASTIC_SPARSE: 70.0}
