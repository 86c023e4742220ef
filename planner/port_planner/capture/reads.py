"""Reads of a step's tensor contents that bypass torch's operators: `numpy()`, `tolist()`, DLPack, items of storages,
sizes of packed sequences.

`item()` and `bool()` are operators, which a recorder sees; these methods reach the memory, and what a program decides
by them would be frozen without a word. They are patched one by one while a step is recorded: an active
TorchFunctionMode would turn off fast paths.

`one_hot` reads the smallest and the largest class in torch itself, only to refuse those out of range, which the kernel
that it calls does too: it is left to that one, or a bundle would hold for these two numbers alone.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from port_planner.torch_compat.modes import composite, remove_kernels, without_modes

_READS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "numpy"),
    (torch.Tensor, "tolist"),
    (torch.Tensor, "__dlpack__"),
    (torch.UntypedStorage, "__getitem__"),
    (torch.UntypedStorage, "tolist"),
    (torch.UntypedStorage, "__iter__"),
)
"""Methods that read the contents of a tensor or a storage; others, such as `__array__`, call one of these.

A tensor's text is not watched: printing decides nothing.
"""

_REPLACED: tuple[tuple[Any, str], ...] = ((PackedSequence, "__new__"), (torch.Tensor, "data"))


@contextmanager
def watch_reads(
    on_read: Callable[[torch.Tensor, str], None], on_exchange: Callable[[torch.Tensor], None] = lambda tensor: None
) -> Iterator[None]:
    """Call `on_read(tensor, method)` before each such method runs in the block; of a storage,
    with its bytes as a tensor.

    Its errors are raised where the program reads. `on_exchange`: called before a tensor's `data` is assigned.
    """
    before = [(owner, name, vars(owner).get(name)) for owner, name in (*_READS, *_REPLACED)]
    kernels = torch.library.Library("aten", "IMPL")
    try:
        kernels.impl("one_hot", _one_hot, "AutogradCPU")
        PackedSequence.__new__ = staticmethod(_watching_sizes(PackedSequence.__new__, on_read))  # type: ignore[method-assign]
        for owner, name in _READS:
            setattr(owner, name, _watching(getattr(owner, name), name, on_read))
        torch.Tensor.data = _watching_data(on_exchange)  # type: ignore[assignment]
        yield
    finally:
        remove_kernels(kernels)
        for owner, name, method in before:
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)


def _watching(
    method: Callable[..., Any], name: str, on_read: Callable[[torch.Tensor, str], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def telling(read: Any, *args: Any, **kwargs: Any) -> Any:
        on_read(read if isinstance(read, torch.Tensor) else _bytes_of(read), name)
        return method(read, *args, **kwargs)

    return telling


def _watching_data(on_exchange: Callable[[torch.Tensor], None]) -> property:
    """Return the attribute `data` of tensors in a form that reports assignments."""
    own: Any = torch.Tensor.data

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        on_exchange(tensor)
        own.__set__(tensor, value)

    return property(own.__get__, assign, own.__delete__)


def _watching_sizes(make: Callable[..., Any], on_read: Callable[[torch.Tensor, str], None]) -> Callable[..., Any]:
    """Report reads of a packed sequence's number of rows per time step, which layers read from its memory."""

    @functools.wraps(make)
    def telling(cls: type, data: Any, batch_sizes: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(batch_sizes, torch.Tensor):
            on_read(batch_sizes, PackedSequence.__name__)
        return make(cls, data, batch_sizes, *args, **kwargs)

    return telling


def _one_hot(classes: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1 or not classes.numel() or classes.dtype is not torch.int64:
        found: torch.Tensor = composite(torch.ops.aten.one_hot.default, classes, num_classes)
        return found
    return classes.new_zeros((*classes.shape, num_classes)).scatter_(-1, classes.unsqueeze(-1), 1)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    with without_modes():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
