"""Expected results of a placed job: its operators run one at a time on their devices, beside plain PyTorch's on one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from port_agent.backend.team_threads import CpuTeams
from port_agent.prepare.placement.eager import EagerStep, eager_contents
from port_agent.prepare.repeatable import UnrepeatableError
from port_agent.training.comparison import MismatchError, processor, tensor_checksum
from port_planner.capture.step import Fill
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.bundle.data_order import bucket_batches
from port_planner.ir.bundle.manifest import BucketSize, ExpectedResults, batch_kind, graph_name
from port_planner.ir.graph import StepGraph, Value
from port_planner.ir.lowering.optimizer_scalars import StepScalars
from port_planner.ir.run_op import view
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.ir.torch_device import generator_states, restore_generators
from port_planner.ir.torch_operators import dtype
from port_planner.job_device import kind_of_job
from port_planner.make_bundle import CapturedJob, TensorSlice
from port_planner.schedules import plateau_of


def with_placed_reference(
    captured: CapturedJob, graphs: Mapping[str, StepGraph], kinds: Mapping[str, Sequence[str]], kind: str
) -> CapturedJob:
    """Return the captured job with the results of its operators on their devices, or teams of threads, instead of plain
    PyTorch's.

    `graphs`: as recorded; `kinds`: of the device that runs each operator; `kind`: of the device other than the CPU.
    Raises MismatchError if the operators run one at a time on the job's own device do not give plain PyTorch's numbers.
    Raises UnrepeatableError if a second run on their devices gives different numbers.
    """
    plain = captured.reference
    if not plain.losses:
        return captured
    home = kind_of_job(captured.job)
    same = _reference(captured, graphs, {name: (home,) * len(graph.ops) for name, graph in graphs.items()}, home)
    if replace(same, placed=False) != plain:
        raise MismatchError(
            f"run one at a time on {home}, the recorded operators do not give plain PyTorch's numbers, so their "
            "results on two devices cannot be checked; plan without --place, and report this"
        )
    placed_job = captured.graphs if captured.teams else graphs
    found = _reference(captured, placed_job, kinds, kind)
    if _reference(captured, placed_job, kinds, kind) != found:
        among = "among teams of threads" if captured.teams else f"between the CPU and {kind}"
        raise UnrepeatableError(
            f"divided {among}, the operators gave different numbers when the first steps ran again; plan without "
            "--place"
        )
    return replace(captured, reference=found)


def _reference(
    captured: CapturedJob, graphs: Mapping[str, StepGraph], kinds: Mapping[str, Sequence[str]], kind: str
) -> ExpectedResults:
    """Return losses and state after as many steps as were compared with plain PyTorch; generators are restored."""
    job, count = captured.job, len(captured.reference.losses)
    before = generator_states((kind,))
    contents = eager_contents({key: _initial(tensor) for key, tensor in captured.tensors.items()})
    scalars = StepScalars(captured.optimizer, captured.schedule, captured.known, plateau_of(job))
    columns = (captured.data, *captured.buckets)
    rows_to_batch = (job.batch_size, *(bucket.batch_size for bucket in job.buckets))
    sizes = [BucketSize(c[0].shape[0], size) for c, size in zip(columns, rows_to_batch, strict=True)]
    per_epoch = sum(size.batches(drop_last=job.drop_last) for size in sizes)
    torch.manual_seed(job.seed)
    losses = []
    settings = arithmetic()
    try:
        with unchanged_arithmetic(), CpuTeams(torch.get_num_threads(), captured.teams) as teams:
            steps = {name: EagerStep(graph, kinds[name], contents, teams) for name, graph in graphs.items()}
            batches = bucket_batches(job.seed, sizes, drop_last=[job.drop_last] * len(sizes))
            for number, (_, bucket, rows) in zip(range(count), batches, strict=False):
                batch = batch_kind(number, job.accumulate)
                step = steps[graph_name(batch, rows.numel(), sizes[bucket], bucket)]
                numbers = scalars.of_batch(number % job.accumulate, job.accumulate)
                loss = float(step.run([column[rows] for column in columns[bucket]], numbers))
                losses.append(loss.hex())
                if scalars.plateau is not None:
                    scalars.plateau.batch_done(loss)
                    if (number + 1) % per_epoch == 0:
                        scalars.plateau.epoch_done()
    finally:
        restore_generators(before)
    checksums = {}
    for key in captured.reference.checksums:
        layout = captured.layouts[key]
        value = Value(0, layout.dtype, layout.shape, layout.stride, layout.offset)
        checksums[key] = tensor_checksum(view(contents[key], value))
    return ExpectedResults(
        tuple(losses), settings.threads, processor(kind), checksums, placed=True, arithmetic=settings
    )


def _initial(tensor: torch.Tensor | Fill | TensorSlice) -> torch.Tensor:
    if isinstance(tensor, Fill):
        return torch.full(tensor.shape, tensor.value, dtype=dtype(tensor.dtype))
    return tensor.tensor.contiguous() if isinstance(tensor, TensorSlice) else tensor
