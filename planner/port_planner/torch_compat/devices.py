"""Devices that share the host's memory, and torch's allocator for them."""

from typing import Any

import torch

from port_planner.torch_compat.parts import uses


@uses("torch._C._construct_storage_from_data_pointer", "nothing pages to a GPU that shares the host's memory")
def storage_over(address: int, device: torch.device, nbytes: int) -> Any:
    """Return a device's storage over host memory, which must outlive the storage."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


@uses("torch.mps._host_alias_storage", "nothing pages to MPS")
def host_alias(storage: torch.UntypedStorage) -> Any:
    """Return the host's view of a storage of MPS."""
    return torch.mps._host_alias_storage(storage)


@uses("torch._C._accelerator_setAllocatorSettings", "pinned memory takes up to twice what a plan counts")
def set_allocator(settings: str) -> None:
    """Set options of torch's accelerator allocator, in the syntax of its environment variable."""
    torch._C._accelerator_setAllocatorSettings(settings)


@uses(
    "torch._C._accelerator_getAllocatorSettings",
    "settings of torch's allocator are lost where segments are made to grow",
)
def allocator_settings() -> str:
    """Return the options that torch's accelerator allocator was given, in the syntax of its environment variable."""
    return str(torch._C._accelerator_getAllocatorSettings() or "")
