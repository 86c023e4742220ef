"""What a scheme costs in bytes: rows and scratch of a layer, where trained values lie, and
when each buffer is alive.
"""

from dataclasses import replace

import numpy as np
import pytest

from port_planner.mcu.arena import ALIGNMENT
from port_planner.mcu.autodiff import LayerUpdate, SparseScheme, full_scheme, last_layers
from port_planner.mcu.frontend import import_module
from port_planner.mcu.ir import Graph, KernelCall, OpKind, row_bytes, scratch_bytes
from port_planner.mcu.memory import buffers_of, parameter_block_bytes, parameter_layout, plan_memory, scratch_of
from tests.planner.mcu.networks import every_layer


@pytest.fixture(scope="module")
def graph() -> Graph:
    module, data = every_layer()
    return import_module(module, data.shape[1:])


def layers(graph: Graph) -> tuple[KernelCall, ...]:
    return graph.weighted()


def test_a_row_is_one_output_channels_weights_and_scratch_two_padded_columns_of_int16(graph: Graph) -> None:
    for op in layers(graph):
        assert row_bytes(op) * op.out_shape.channels == op.weight_count
        columns = 2 * 2 * (-(-row_bytes(op) // 4) * 4)
        assert scratch_bytes(op) == (columns if op.kind is OpKind.CONV else 0)


def test_frozen_layers_take_no_ram_and_trained_values_do_not_overlap(graph: Graph) -> None:
    first, *_, last = layers(graph)
    scheme = SparseScheme({first.name: LayerUpdate(True, 0), last.name: LayerUpdate(True, 2)})
    layout = parameter_layout(graph, scheme)
    assert layout.slots[first.name].weight_offset is None and layout.slots[first.name].bias_offset == 0
    assert layout.slots[last.name].bias_offset == 4 * first.out_shape.channels
    biases = 4 * (first.out_shape.channels + last.out_shape.channels)
    assert (layout.bias_bytes, layout.weight_bytes) == (biases, 2 * row_bytes(last))
    assert layout.slots[last.name].weight_offset == biases, "int32 first: they must be aligned"
    assert all(
        slot == type(slot)(None, None, None) for name, slot in layout.slots.items() if name not in scheme.updates
    )
    assert layout.size_bytes >= biases + 2 * row_bytes(last) and layout.size_bytes % ALIGNMENT == 0
    assert parameter_layout(graph, SparseScheme({})).size_bytes == 0


def test_low_bytes_of_q88_lie_behind_all_rows(graph: Graph) -> None:
    scheme = full_scheme(graph)
    plain, fine = parameter_layout(graph, scheme), parameter_layout(graph, scheme.with_low_bytes())
    assert fine.size_bytes >= plain.bias_bytes + 2 * plain.weight_bytes
    for name, slot in fine.slots.items():
        assert slot.weight_offset == plain.slots[name].weight_offset and plain.slots[name].q88_offset is None
        assert slot.weight_offset is not None and slot.q88_offset == slot.weight_offset + plain.weight_bytes
    taken = np.zeros(fine.size_bytes, int)
    for op in layers(graph):
        slot, rows = fine.slots[op.name], op.weight_count
        for start, size in (
            (slot.bias_offset, 4 * op.out_shape.channels),
            (slot.weight_offset, rows),
            (slot.q88_offset, rows),
        ):
            assert start is not None
            taken[start : start + size] += 1
    assert taken.max() == 1, "each byte belongs to one value"


def test_layers_without_low_bytes_take_none(graph: Graph) -> None:
    scheme, without = full_scheme(graph), layers(graph)[1]
    mixed, fine = (parameter_layout(graph, scheme.with_low_bytes(names)) for names in ({without.name}, ()))
    assert mixed.slots[without.name].q88_offset is None
    assert sum(slot.q88_offset is None for slot in mixed.slots.values()) == 1
    assert 0 <= fine.size_bytes - mixed.size_bytes - without.weight_count < ALIGNMENT
    update = scheme.with_low_bytes().of(without.name)
    whole = [parameter_block_bytes(without, replace(update, q88=wide)) for wide in (True, False)]
    assert 0 <= whole[0] - whole[1] - without.weight_count + ALIGNMENT <= 2 * ALIGNMENT


def test_a_buffer_is_alive_from_its_first_step_to_its_last(graph: Graph) -> None:
    plan = plan_memory(graph, last_layers(graph, 2))
    buffers = {buffer.name: buffer for buffer in buffers_of(plan.program, last_layers(graph, 2))}
    assert buffers[graph.input_name].first == -1, "written before the first step"
    assert all(buffer.first <= buffer.last for buffer in buffers.values())
    convolution = next(op for op in layers(graph) if op.kind is OpKind.CONV)
    scratch = buffers[scratch_of(convolution.name)]
    assert scratch.first == scratch.last and scratch.size_bytes == scratch_bytes(convolution)
    without = {buffer.name for buffer in buffers_of(plan.program, last_layers(graph, 2), simd=False)}
    assert without == {name for name in buffers if not name.startswith("s:")}


def test_the_gradient_of_the_classifier_lives_where_its_logits_were(graph: Graph) -> None:
    plan = plan_memory(graph, full_scheme(graph))
    last = graph.ops[-1].name
    assert plan.offset(f"d:{last}") == plan.offset(last)
    assert plan.ram_bytes == plan.arena.peak_bytes + plan.parameters.size_bytes


def test_training_takes_more_than_inference_and_more_layers_more(graph: Graph) -> None:
    inference = plan_memory(graph, None)
    nothing = plan_memory(graph, SparseScheme({layers(graph)[0].name: LayerUpdate()}))
    assert inference.parameters.size_bytes == 0 and nothing.ram_bytes == inference.ram_bytes
    sizes = [plan_memory(graph, last_layers(graph, count)).ram_bytes for count in (1, 2, len(layers(graph)))]
    assert inference.ram_bytes <= sizes[0] < sizes[1] <= sizes[2]
