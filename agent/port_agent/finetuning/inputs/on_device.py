"""The device that a fine-tuning computes on: kernels that repeat, and the states of its random generators."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch

from port_agent.backend.choose import backend_of
from port_planner.ir.device_kinds import CPU, CUDA
from port_planner.ir.torch_device import generator_state, repeat_kernels, set_generator_state

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", f":{4 << 10}:8"
"""Variable without which CUDA's products may differ from run to run: eight buffers of 4 MiB."""


def begin_on_device(kind: str) -> None:
    """Let a kind of device compute the same bits each time; an operator that cannot raises RuntimeError, which names it.

    Does nothing on the CPU. Raises DeviceAbsentError if this machine has no such device.
    """
    if kind == CPU:
        return
    backend_of(kind)
    if kind == CUDA:
        os.environ.setdefault(*_CUBLAS_WORKSPACE)
    repeat_kernels(kind)
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False


def random_states(kind: str) -> tuple[torch.Tensor, ...]:
    """Return the state of torch's generator, and on another device than the CPU that of its generator."""
    return tuple(generator_state(one) for one in dict.fromkeys((CPU, kind)))


def set_random_states(kind: str, states: Sequence[torch.Tensor]) -> None:
    """Restore what `random_states` returned."""
    for one, state in zip(dict.fromkeys((CPU, kind)), states, strict=True):
        set_generator_state(one, state.clone())


def forked_random(kind: str) -> contextlib.AbstractContextManager[object]:
    """Return a context after which the generators of the CPU and of a kind of device are as before."""
    if kind == CPU:
        return torch.random.fork_rng(devices=())
    return torch.random.fork_rng(devices=(torch.get_device_module(kind).current_device(),), device_type=kind)


def on_host(value: Any) -> Any:
    """Return a value of tensors in lists and dictionaries with those of a device copied to the host one by one."""
    if isinstance(value, torch.Tensor):
        return value.to(CPU)
    if isinstance(value, dict):
        return {name: on_host(one) for name, one in value.items()}
    return [on_host(one) for one in value] if isinstance(value, list) else value
