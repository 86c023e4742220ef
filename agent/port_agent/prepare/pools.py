"""The memory budgets of a job: the host's, and the device's if it has its own memory."""

import time
from dataclasses import dataclass, replace

import torch

from port_agent.backend.base import Backend
from port_agent.backend.staging import BUFFERS
from port_agent.backend.transfer_ring import TransferRing
from port_agent.paging.pager import BURST
from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.costs import DeviceCosts, Flash
from port_planner.ir.device_kinds import CPU
from port_planner.profiling.operator_profile import MIN_MEDIUM_JOULES

_HOST_NAME = "host memory"
_SAMPLE_BYTES, _LATENCY_BYTES = 16 << 20, 4096
_REPEATS = 3
_MIN_SECONDS = 1e-6
"""Least seconds of a sample, because of the resolution of clocks."""


class PoolError(PortError):
    """The budgets do not match the memory of a job's device."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Pools:
    """Budgets in bytes: of the host's memory, and of the device's own; None if operators compute in the host's memory.

    `recording_bytes`: limit of the device's own memory during plain steps, which are recorded and compared.
    """

    ram_bytes: int
    device_bytes: int | None = None
    recording_bytes: int | None = None

    @property
    def computing_bytes(self) -> int:
        """Budget of the memory in which operators compute, and for which plans are made."""
        return self.ram_bytes if self.device_bytes is None else self.device_bytes


def pools_of(backend: Backend, ram_bytes: int, gpu_ram_bytes: int | None, recording_bytes: int | None = None) -> Pools:
    """Return the budgets of a job on this device; raises PoolError if one is missing, or one too many is given."""
    if not backend.unified and gpu_ram_bytes is None:
        raise PoolError(
            f"the model computes on {backend.kind}, which has memory of its own; give the job's budget of it with "
            "--gpu-ram"
        )
    if backend.unified and (gpu_ram_bytes is not None or recording_bytes is not None):
        where = (
            "the CPU (--device moves it)" if backend.kind == CPU else f"{backend.kind}, which shares the host's memory"
        )
        raise PoolError(f"--gpu-ram: the model computes on {where}; --ram covers all of it, so leave out --gpu-ram")
    return Pools(ram_bytes, gpu_ram_bytes, gpu_ram_bytes if recording_bytes is None else recording_bytes)


def with_own_memory(device: DeviceCosts, backend: Backend, pools: Pools) -> DeviceCosts:
    """Return the costs of a machine whose operators compute on this device, with separate host memory as a paging
    target.

    `device.base_bytes` is what the process holds of the host's memory; the dry run corrects both pools.
    """
    outside = backend.outside_bytes()
    if backend.unified:
        return replace(device, base_bytes=device.base_bytes + outside)
    host_base = device.base_bytes + BUFFERS * BURST
    beside = replace(
        device,
        base_bytes=outside,
        host_base_bytes=host_base,
        scratch_targets=(*device.scratch_targets, measured_host(backend, pools.computing_bytes - outside)),
    )
    return with_host_headroom(beside, pools.ram_bytes)


def with_transfer_ring(device: DeviceCosts, backend: Backend) -> DeviceCosts:
    """Return the same costs with a ring for transfers, if operators are divided between the host and a
    device with its own memory.
    """
    return device if backend.unified else replace(device, host_base_bytes=device.host_base_bytes + BUFFERS * BURST)


def with_host_headroom(device: DeviceCosts, ram_bytes: int) -> DeviceCosts:
    """Return the same, with pages limited to what the host's budget leaves for them."""
    free_bytes = max(0, ram_bytes - device.host_base_bytes)
    targets = (t if t.capacity_bytes is None else replace(t, capacity_bytes=free_bytes) for t in device.scratch_targets)
    return replace(device, scratch_targets=tuple(targets))


def measured_host(backend: Backend, free_bytes: int) -> Flash:
    """Return the host's memory as a paging target of the device, with the measured speed of copies and no space yet.

    Its joules per byte are an estimate: those of the most economical medium, which include a copy. `free_bytes`: bytes
    that tensors may take of the device's memory.
    """
    sample = min(_SAMPLE_BYTES, max(2 * _LATENCY_BYTES, (free_bytes - backend.allocated_bytes()) // 2))
    sizes = (sample, _LATENCY_BYTES)
    out, into = ([_seconds(backend, size, out=way) for size in sizes] for way in (True, False))
    return Flash(
        _HOST_NAME,
        _rate(sample, into),
        _rate(sample, out),
        min(out[1], into[1]),
        MIN_MEDIUM_JOULES,
        MIN_MEDIUM_JOULES,
        capacity_bytes=0,
    )


def _rate(nbytes: int, seconds: list[float]) -> float:
    return (nbytes - _LATENCY_BYTES) / max(seconds[0] - seconds[1], _MIN_SECONDS)


def _seconds(backend: Backend, nbytes: int, *, out: bool) -> float:
    """Return the seconds of the fastest of a few copies out of the device, or into it."""
    there, here = backend.allocate(nbytes)[:nbytes], backend.allocate_host(nbytes)[:nbytes]
    target, source = (here, there) if out else (there, here)
    source.zero_()
    return copy_seconds(backend, target, source)


def copy_seconds(
    backend: Backend, target: torch.Tensor, source: torch.Tensor, ring: TransferRing | None = None
) -> float:
    """Return the seconds of the fastest of a few copies of bytes, one or both of which are on the backend's device.
    `ring`: copy through this ring.
    """
    seconds = []
    for _ in range(_REPEATS):
        backend.synchronize()
        begin = time.perf_counter()
        if ring is None:
            backend.copy(target, source, backend.reached()).synchronize()
        elif target.device.type == CPU:
            ring.out_of_device(target, source).synchronize()
        else:
            ring.into_device(target, source).synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
