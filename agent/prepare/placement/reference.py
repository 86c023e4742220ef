"""What a placed job's first steps must give: its operators one by one on their devices, beside plain PyTorch's on one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from agent.backend.raw_bytes import view
from agent.prepare.placement.eager import EagerStep, eager_contents
from agent.prepare.repeatable import UnrepeatableError
from agent.train.comparison import MismatchError, processor, tensor_checksum
from planner.capture.step import Fill
from planner.ir.bundle.bundle import BucketSize, Reference, graph_name
from planner.ir.bundle.data_order import bucket_batches
from planner.ir.devices.torch_device import generator_states, restore_generators
from planner.ir.graph import StepGraph, Value
from planner.ir.lowering.optimizer_scalars import StepScalars
from planner.ir.torch_operators import dtype
from planner.job_device import kind_of_job
from planner.make_bundle import Prepared, TensorPart


def with_placed_reference(
    prepared: Prepared, graphs: Mapping[str, StepGraph], kinds: Mapping[str, Sequence[str]], kind: str
) -> Prepared:
    """Return what was prepared with the numbers of its operators on their devices in place of plain PyTorch's.

    `graphs`: as they were recorded; `kinds`: of the device that each operator runs on; `kind`: of the device beside the CPU. Raises
    MismatchError where the operators one by one, all where the job lies, do not give plain PyTorch's numbers, and
    UnrepeatableError where a second run on their devices gives other numbers than the first.
    """
    plain = prepared.reference
    if not plain.losses:
        return prepared
    home = kind_of_job(prepared.job)
    same = _reference(prepared, graphs, {name: (home,) * len(graph.ops) for name, graph in graphs.items()}, home)
    if replace(same, placed=False) != plain:
        raise MismatchError(
            f"run one by one on {home}, the recorded operators do not give plain PyTorch's numbers, so nothing is known of what they give "
            "on two devices: plan without --place, and report this"
        )
    found = _reference(prepared, graphs, kinds, kind)
    if _reference(prepared, graphs, kinds, kind) != found:
        raise UnrepeatableError(
            f"divided between the CPU and {kind}, the operators gave other numbers when the first steps ran again: plan without --place"
        )
    return replace(prepared, reference=found)


def _reference(
    prepared: Prepared, graphs: Mapping[str, StepGraph], kinds: Mapping[str, Sequence[str]], kind: str
) -> Reference:
    """Return losses and state after as many steps as were compared with plain PyTorch; generators are then as before."""
    job, count = prepared.job, len(prepared.reference.losses)
    before = generator_states((kind,))
    contents = eager_contents({key: _initial(tensor) for key, tensor in prepared.tensors.items()})
    steps = {name: EagerStep(graph, kinds[name], contents) for name, graph in graphs.items()}
    scalars = StepScalars(prepared.optimizer, prepared.schedule)
    size = BucketSize(prepared.data[0].shape[0], job.batch_size)
    torch.manual_seed(job.seed)
    losses = []
    try:
        batches = bucket_batches(job.seed, [size], drop_last=[job.drop_last])
        for _, (_, _, rows) in zip(range(count), batches, strict=False):
            step = steps[graph_name("step", rows.numel(), size)]
            losses.append(float(step.run([column[rows] for column in prepared.data], scalars.advance())).hex())
    finally:
        restore_generators(before)
    checksums = {}
    for key in prepared.reference.checksums:
        layout = prepared.layouts[key]
        value = Value(0, layout.dtype, layout.shape, layout.stride, layout.offset)
        checksums[key] = tensor_checksum(view(contents[key], value))
    return Reference(tuple(losses), torch.get_num_threads(), processor(kind), checksums, placed=True)


def _initial(tensor: torch.Tensor | Fill | TensorPart) -> torch.Tensor:
    if isinstance(tensor, Fill):
        return torch.full(tensor.shape, tensor.value, dtype=dtype(tensor.dtype))
    return tensor.tensor.contiguous() if isinstance(tensor, TensorPart) else tensor
