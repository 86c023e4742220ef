"""Torch's functions for a kind of device: its generator's state, and waiting for it.

They are shared by capture, profile and executor.
"""

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from port_planner.base.errors import CaptureError
from port_planner.ir.device_kinds import CPU, CUDA, MPS


def own_device_file() -> str | None:
    """Return the source file of the device that a program registered with torch, or None."""
    try:
        module = torch.get_device_module(torch.device("privateuseone").type)
    except RuntimeError:
        return None
    return getattr(sys.modules.get(type(module).__module__), "__file__", None)


def known_kinds() -> tuple[str, ...]:
    """Return the kinds that a graph may name: torch's own, and one that is registered as private."""
    return CPU, CUDA, MPS, torch.device("privateuseone").type


def module_of(kind: str) -> ModuleType:
    """Return torch's module for a kind of device, such as `torch.cuda`."""
    found: ModuleType = torch.get_device_module(kind)
    return found


def kind_of(tensor: torch.Tensor) -> str:
    """Return the kind of device on which a tensor is.

    Raises CaptureError for a device that no plan can name: another backend, or a second card.
    """
    device = tensor.device
    if device.type not in known_kinds() or device.index not in (None, 0):
        raise CaptureError(
            f"the step uses a tensor on {device}; move the model and the batch to the CPU or to the first device of "
            f"one of {', '.join(known_kinds()[1:3])}"
        )
    return device.type


def generator_state(kind: str) -> torch.Tensor:
    """Return the state of a kind's default generator, on the CPU."""
    state: torch.Tensor = torch.get_rng_state() if kind == CPU else module_of(kind).get_rng_state()
    return state


def set_generator_state(kind: str, state: torch.Tensor) -> None:
    """Put a default generator into a state that `generator_state` gave."""
    if kind == CPU:
        torch.set_rng_state(state)
    else:
        module_of(kind).set_rng_state(state)


def generator_states(kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the states of the default generators of the CPU and of these kinds."""
    return {kind: generator_state(kind) for kind in sorted({CPU, *kinds})}


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the states that `generator_states` returned."""
    for kind, state in states.items():
        set_generator_state(kind, state)


def device_name(kind: str) -> str:
    """Return the maker's name of the device, such as `NVIDIA H100` or `Apple M2`; its kind
    if torch does not know it.
    """
    if kind == MPS and torch.backends.mps.is_available():
        return str(torch.backends.mps.get_name())
    named = None if kind == CPU else getattr(module_of(kind), "get_device_name", None)
    return kind if named is None else str(named())


def repeat_kernels(kind: str) -> None:
    """Make a device's libraries choose repeatable kernels, and the same ones each time.

    Otherwise cuDNN uses backward passes of convolutions that add in any order, and may pick the fastest kernel by
    timing.
    """
    if kind == CUDA:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def synchronize(kind: str) -> None:
    """Block until a device has finished all its work; returns at once on the CPU."""
    if kind != CPU:
        module_of(kind).synchronize()


def kinds_of(tensors: Iterable[Any]) -> frozenset[str]:
    """Return the kinds of devices on which these tensors are. Raises CaptureError as `kind_of` does."""
    return frozenset(kind_of(t) for t in tensors if isinstance(t, torch.Tensor))
