"""Modes can be listed, lifted and switched off; kernels of composites are torch's own."""

from typing import Any

import torch

from port_planner.torch_compat.modes import (
    DispatchKey,
    OperatorMode,
    composite,
    current_modes,
    has_kernel,
    pop_mode,
    push_mode,
    remove_kernels,
    seeing,
    without_modes,
)


class _Names(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.excluded: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        key = DispatchKey.ADInplaceOrView
        for keys in ((), (key,)):
            with seeing(keys):
                self.excluded.append(torch._C._dispatch_tls_is_dispatch_key_excluded(key))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_operators_but_where_it_is_lifted_or_switched_off() -> None:
    x = torch.ones(2)
    with _Names() as mode:
        x.neg()
        assert current_modes() == [mode]
        with without_modes():
            x.abs()
        lifted = pop_mode()
        x.sin()
        push_mode(lifted)
        x.cos()
    assert mode.names == ["aten::neg", "aten::cos"] and current_modes() == []
    assert mode.excluded == [True, False] * 2, "keys are off in a handler, and on where they are to be seen"


def test_composites_are_those_of_c_and_run_their_own_kernel() -> None:
    key = DispatchKey.CompositeImplicitAutograd
    assert has_kernel(torch.ops.aten.linear.default, key) and not has_kernel(torch.ops.aten.mm.default, key)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(composite(torch.ops.aten.linear.default, x, w), torch.nn.functional.linear(x, w))


def test_kernels_of_ours_go_when_they_are_taken_away() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("one_hot", lambda classes, num_classes=-1: classes + 41, "AutogradCPU")
    classes = torch.tensor([1], requires_grad=False)
    assert torch.nn.functional.one_hot(classes).tolist() == [42]
    remove_kernels(library)
    assert torch.nn.functional.one_hot(classes).tolist() == [[0, 1]]
