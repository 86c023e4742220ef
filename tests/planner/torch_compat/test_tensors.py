"""Storages in typed ones, buffers, zeros without memory, and what writes files."""

import warnings

import torch

from port_planner.torch_compat.tensors import (
    DLPACK_EXPORTS,
    FILE_READS,
    FILE_WRITES,
    SCRIPT_SAVES,
    STORAGE_METHODS,
    is_zero,
    set_buffer,
    untyped,
)


def test_what_is_guarded_is_there() -> None:
    assert all(hasattr(torch.UntypedStorage, name) for names in STORAGE_METHODS.values() for name in names)
    assert all(hasattr(owner, name) for owner, name in (*DLPACK_EXPORTS, *SCRIPT_SAVES, FILE_READS, FILE_WRITES))
    assert {name for _, name in SCRIPT_SAVES} >= {"save", "save_to_buffer"}


def test_the_storage_in_a_typed_one_is_read_without_a_warning() -> None:
    x = torch.ones(2)
    with warnings.catch_warnings(action="ignore"):
        typed = x.storage()
    with warnings.catch_warnings(action="error"):
        assert untyped(typed).data_ptr() == x.data_ptr()


def test_a_buffer_that_a_model_lost_is_its_buffer_again() -> None:
    module = torch.nn.BatchNorm1d(2)
    mean = module.running_mean
    del module.running_mean
    set_buffer(module, "running_mean", torch.ones(2) if mean is None else mean)
    assert module.state_dict()["running_mean"] is not None and module.running_mean is mean


def test_zeros_that_autograd_made_up_are_known() -> None:
    assert is_zero(torch._efficientzerotensor((3,))) and not is_zero(torch.zeros(3))
