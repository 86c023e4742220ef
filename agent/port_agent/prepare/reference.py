"""Plain PyTorch's first steps of a job, with which its bundle is compared.

The job's own steps run; then job and generators are restored.
"""

import copy
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from port_agent.prepare.repeatable import not_repeated
from port_agent.training.comparison import processor, tensor_checksum
from port_planner.base.errors import CaptureError
from port_planner.capture.step import bind_buffers, record_again
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.bundle.manifest import ExpectedResults, Recordings
from port_planner.ir.device_kinds import CPU
from port_planner.ir.graph import Role, storage_key
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.ir.torch_device import generator_states, restore_generators
from port_planner.job import TrainingJob
from port_planner.job_device import kind_of_job
from port_planner.make_bundle import CapturedJob
from port_planner.plain_steps import Pass, dropped_optimizer_state, model_state, plain_losses, plain_pass


def compared_steps(job: TrainingJob) -> int:
    """Return how many batches show every kind of step.

    They cover the time before and after an update, each phase of accumulation, and each bucket.
    """
    return job.accumulate + 1 + len(job.buckets)


def with_expected_results(captured: CapturedJob, steps: int) -> CapturedJob:
    """Return the captured job with the losses and the state of plain PyTorch after `steps` batches.

    The steps are recorded again for each phase of accumulation, if `prepare` left that to them. On a device they run
    twice. Raises what the job raises. Raises CaptureError if a step differs from the recorded one or training changes
    something that the recorded step does not, and UnrepeatableError if the second run gave different numbers.
    """
    if not steps or captured.known is not None:  # this program has counted on: the script alone is compared
        return captured
    again = _Recording(captured)
    reference = _plain(captured, steps, again.run)
    if kind_of_job(captured.job) != CPU and _plain(captured, steps, plain_pass) != reference:
        raise not_repeated(captured.job, captured.data)
    return replace(captured, reference=reference, recordings=again.added_to(captured.recordings), tapes={})


class _Recording:
    """Runs steps as the program does, and records those again for whose bucket and number of rows no
    recording was compared yet.
    """

    def __init__(self, captured: CapturedJob) -> None:
        self._tapes = captured.tapes
        self._counts = dict.fromkeys(captured.tapes, 0)
        place = ", the batch's place in an update" if captured.job.accumulate > 1 else ""
        self._varied = f"the weights and states, by an update{', of further shapes' if captured.buckets else ''}{place}"

    def run(self, job: TrainingJob, batch: tuple[torch.Tensor, ...], number: int, bucket: int) -> torch.Tensor:
        recorded = bucket, len(batch[0])
        if recorded not in self._tapes:
            return plain_pass(job, batch, number, bucket)
        self._counts[recorded] += 1
        return record_again(self._tapes[recorded], job.model, job.loss_of(bucket), job.optimizer, batch)

    def added_to(self, recordings: Recordings) -> Recordings:
        """Return the least number of recordings of each graph, including these, and what was varied."""
        if not self._counts:
            return recordings
        count = min(recordings.count, 1 + min(self._counts.values()))
        return replace(recordings, count=count, varied=(*recordings.varied, self._varied))


def _plain(captured: CapturedJob, steps: int, run: Pass) -> ExpectedResults:
    """Train `steps` batches with the job's own code, record losses and state, and restore everything."""
    job, recorded = captured.job, captured.layouts
    with _put_back(captured), unchanged_arithmetic():
        settings = arithmetic()
        before = {key: tensor_checksum(tensor) for key, tensor in model_state(job) if key not in recorded}
        losses = tuple(loss.hex() for loss in plain_losses(job, captured.data, steps, run, captured.buckets))
        changed = [key for key, tensor in model_state(job) if key in before and tensor_checksum(tensor) != before[key]]
        if changed:
            raise CaptureError(
                f"training changes {', '.join(changed)}, which the recorded step does not change; train with "
                "`port-agent exec`, which runs the program itself"
            )
        state = itertools.chain(dropped_optimizer_state(job), model_state(job))
        checksums = {key: tensor_checksum(tensor) for key, tensor in state if key in recorded}
    return ExpectedResults(losses, settings.threads, processor(kind_of_job(job)), checksums, arithmetic=settings)


# -- as it was before


@contextmanager
def _put_back(captured: CapturedJob) -> Iterator[None]:
    """Restore what training changes: weights that are trained or written, buffers, gradients, optimizer,
    scheduler and generators.
    """
    job = captured.job
    optimizer, scheduler = job.optimizer, job.scheduler
    buffers = dict(job.model.named_buffers(remove_duplicate=False))
    graphs = captured.graphs.values()
    written = {graph.storages[s].key for graph in graphs for op in graph.ops for s in op.writes}
    trained: list[torch.Tensor] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of_optimizer = set(trained)
    others = (item for item in job.model.named_parameters() if item[1] not in of_optimizer)
    trained += [parameter for name, parameter in others if storage_key(Role.PARAMETER, name) in written]
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    contents = [(tensor, tensor.detach().to(CPU, copy=True)) for tensor in (*trained, *job.model.buffers(), *kept)]
    gradients = [(parameter, parameter.grad) for parameter in job.model.parameters()]
    states = [(parameter, state, dict(state)) for parameter, state in optimizer.state.items()]
    groups = [_copied(group) for group in optimizer.param_groups]
    schedule = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
    generators = random.getstate(), np.random.get_state(legacy=False)
    of_devices = generator_states((kind_of_job(job),))
    try:
        yield
    finally:
        bind_buffers(job.model, buffers)
        with torch.no_grad():
            for tensor, content in contents:
                tensor.copy_(content)
        for tensor, gradient in gradients:
            tensor.grad = gradient
        optimizer.state.clear()
        for parameter, state, values in states:
            state.clear()
            state.update(values)
            optimizer.state[parameter] = state
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()  # of the numbers that an optimizer began to count in it
            group.update(values)
        if scheduler is not None:
            scheduler.load_state_dict(schedule)
        restore_generators(of_devices)
        random.setstate(generators[0])
        np.random.set_state(generators[1])


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with separate tensors; the parameters of a group stay the same objects."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
