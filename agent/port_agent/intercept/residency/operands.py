"""What one call of an operator reads, writes and makes, as storages."""

import math
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch

from port_agent.intercept.residency.storages import Storage, StorageTable, data_ptr, untyped_storage
from port_planner.operators import operator_of
from port_planner.operators.row import Result
from port_planner.torch_compat.modes import DispatchKey, has_kernel, is_traceable_wrapper_subclass
from port_planner.torch_compat.tensors import untyped

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, in lists and tuples too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


DENSE_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor subclass has no memory of its own, but wraps other tensors."""
    if type(tensor) in DENSE_TYPES or is_traceable_wrapper_subclass(tensor):
        return type(tensor) not in DENSE_TYPES
    try:
        data_ptr(untyped_storage(tensor))
    except (RuntimeError, NotImplementedError):
        return True
    return False


def strided_runs(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided tensors that hold a tensor's bytes: itself, or the parts of a sparse one."""
    layout = tensor.layout
    if layout is torch.strided:
        return (tensor,)
    if layout is torch.sparse_coo:
        return (torch.ops.aten._indices(tensor), torch.ops.aten._values(tensor))
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    return ()


def storages_in(arguments: Any, table: StorageTable) -> list[Storage]:
    """Return the followed storages of all tensors among arguments, as often as each occurs."""
    found: list[Storage] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            for part in (argument,) if argument.layout is torch.strided else strided_runs(argument):
                storage = table.of(part)
                if storage is not None:
                    found.append(storage)
        elif isinstance(argument, (list, tuple)):
            found += storages_in(argument, table)
    return found


def bare_storages_in(arguments: Any, table: StorageTable) -> list[Storage]:
    """Return the followed storages among arguments that are bare storages, as `Tensor.set_` takes them."""
    found = []
    for argument in arguments:
        if isinstance(argument, torch.TypedStorage):
            argument = untyped(argument)
        storage = table.known_storage(argument) if isinstance(argument, torch.UntypedStorage) else None
        if storage is not None:
            found.append(storage)
    return found


@cache
def stable_number(func: Any) -> int:
    """Return a number for an operator that is the same in every process."""
    return zlib.crc32(f"{func._schema.name}.{func._schema.overload_name}".encode())


_UNSAFE_VIEW = "aten::_unsafe_view"
"""A view whose schema does not declare it as one, because autograd need not know."""


@cache
def only_views(func: Any) -> bool:
    """Return whether an operator reads no byte of its operands, because everything that it
    returns is a view of them.
    """
    if func._schema.name == _UNSAFE_VIEW:
        return True
    if is_composite(func):  # `contiguous` and others return an operand or a copy of it
        return False
    written = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    results = func._schema.returns
    return bool(results) and not written and all(result.alias_info is not None for result in results)


@cache
def is_composite(func: Any) -> bool:
    """Return whether an operator is composed of others."""
    return has_kernel(func, DispatchKey.CompositeImplicitAutograd)


@cache
def makes_storage(func: Any) -> bool:
    """Return whether an operator returns a tensor that is not a view of an argument."""
    if func._schema.name == _UNSAFE_VIEW:
        return False
    return any(result.alias_info is None and "Tensor" in str(result.type) for result in func._schema.returns)


def _created_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
        return 0  # of a model that a loader makes on the meta device
    place = next(k for k, argument in enumerate(func._schema.arguments) if argument.name == "size")
    if len(args) <= place or not all(isinstance(size, int) for size in args[place]):
        return None
    unsaid = torch.int64 if func._schema.name == "aten::randint" else torch.get_default_dtype()
    dtype = unsaid if kwargs.get("dtype") is None else kwargs["dtype"]
    return int(math.prod(args[place]) * dtype.itemsize)


def _normalised_bytes(name: str, args: Any) -> int | None:
    """Return the bytes of a normalisation's results: one like the input, with mean and deviation, or the gradients of
    weight and bias.
    """
    backward = name.endswith("_backward")
    x = args[1] if backward else args[0]
    if x.dtype not in (torch.float32, torch.float64):
        return None
    if name.startswith("aten::native_layer_norm"):
        inside = math.prod(args[2] if backward else args[1])
        counts = (x.numel(), inside, inside) if backward else (x.numel(), *(2 * (x.numel() // max(inside, 1),)))
    else:
        channels, statistics = x.shape[1], backward or args[5]
        counts = (x.numel(), *(2 * (channels if statistics else 0,)))
    wanted = args[-1] if backward else (True, True, True)
    return int(sum(count for count, made in zip(counts, wanted, strict=True) if made) * x.element_size())


def known_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the bytes of a common operator's result without its meta kernel, which is Python and takes 100 us."""
    try:
        return _bytes_by_shape(func, args, kwargs)
    except RuntimeError:  # nested tensors have no shape
        return None


def _bytes_by_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
    name = func._schema.name
    known = operator_of(name)
    if name == "aten::embedding":
        return int(args[1].numel() * args[0].shape[1:].numel() * args[0].element_size())
    if known.result is Result.INTO_ZEROS and all(isinstance(size, int) for size in args[1]):
        return int(math.prod(args[1]) * args[0].element_size())
    if name == "aten::embedding_dense_backward":
        return int(args[2] * args[0].shape[-1] * args[0].element_size())
    if known.result is Result.CREATED:
        return _created_bytes(func, args, kwargs)
    if known.result is Result.LIKE and kwargs.get("device") is None:
        return int(args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize)
    if known.result is Result.NORMALIZED:
        return _normalised_bytes(name, args)
    factors = known.factors
    if factors is not None and not func._schema.overload_name and len(args) > max(factors):
        left, right = (args[k] for k in factors)
        return int(left.shape[:-1].numel() * right.shape[-1] * left.element_size())
    if name == "aten::mean" and not func._schema.overload_name:
        return int((kwargs.get("dtype") or args[0].dtype).itemsize)
    if name == "aten::sum" and func._schema.overload_name == "dim_IntList" and args[0].is_floating_point() and args[1]:
        gone = {dim % max(args[0].dim(), 1) for dim in args[1]}
        kept = (size for dim, size in enumerate(args[0].shape) if dim not in gone)
        return int(math.prod(kept) * (kwargs.get("dtype") or args[0].dtype).itemsize)
    if (
        name == "aten::nll_loss_forward" and args[3]
    ):  # the unreduced loss, one value for each row, and the sum of weights
        return int(2 * args[0].element_size())
    if name == "aten::nll_loss_backward":
        return int(args[1].numel() * args[1].element_size())
    if name == "aten::stack" and len({t.dtype for t in args[0]}) == 1:
        return int(sum(t.numel() * t.element_size() for t in args[0]))
    if (
        known.result is Result.ROWS
        and args[0].dtype is torch.float32
        and kwargs.get("dtype") is None
        and args[-1] is not torch.float64
    ):
        return int(args[0].numel() * args[0].element_size())
    if name == "aten::_to_copy" and args[0].layout is torch.strided and kwargs.get("device") in (None, args[0].device):
        return int(args[0].numel() * (kwargs.get("dtype") or args[0].dtype).itemsize)
    tensors = list(tensors_in(args))
    if not tensors or kwargs.get("dtype") is not None:
        return None
    if known.result is Result.COMPARISON:
        return _broadcast_elements(tensors)
    if name == "aten::where" and len(tensors) == 3 and tensors[1].dtype is tensors[2].dtype:
        return _broadcast_elements(tensors) * tensors[1].element_size()
    dtype = tensors[0].dtype
    if (
        known.result is not Result.BROADCAST
        or not dtype.is_floating_point
        or any(t.dtype is not dtype for t in tensors)
    ):
        return None
    return _broadcast_elements(tensors) * dtype.itemsize


def _broadcast_elements(tensors: Sequence[torch.Tensor]) -> int:
    elements = 1
    for place in range(1, max(t.dim() for t in tensors) + 1):
        sizes = [t.shape[-place] for t in tensors if t.dim() >= place]
        elements *= next((size for size in sizes if size != 1), 1)
    return elements


def result_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int | None:
    """Return the bytes that an operator will make, by its operands or its meta kernel; None if that is unknown.

    A result whose shape depends on values has no meta kernel, and some operators have none at all. No operator is ever
    run on real memory here, because one that draws random numbers would draw them twice.
    """
    if not makes_storage(func):
        return 0
    known = known_bytes(func, args, kwargs)
    if known is not None:
        return known
    on_meta = kwargs
    if kwargs.get("device") is not None or next(tensors_in((*args, *kwargs.values())), None) is None:
        if torch.Tag.nondeterministic_seeded in func.tags or all(a.name != "device" for a in func._schema.arguments):
            return None
        on_meta = {**kwargs, "device": "meta"}
    try:
        made = func(*_meta(args), **dict(zip(on_meta, _meta(on_meta.values()), strict=True)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    return sum(t.numel() * t.element_size() for t in tensors_in(made if isinstance(made, (list, tuple)) else (made,)))


def _meta(values: Any) -> list[Any]:
    return [
        torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else _meta(v)
        if isinstance(v, (list, tuple))
        else v
        for v in values
    ]


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of the arguments that an operator writes."""
    hidden = operator_of(func._schema.name).hidden_writes
    return tuple(
        (k, argument.name)
        for k, argument in enumerate(func._schema.arguments)
        if k in hidden or (argument.alias_info is not None and argument.alias_info.is_write)
    )


def written_storages(func: Any, args: Any, kwargs: dict[str, Any], table: StorageTable) -> list[Storage]:
    """Return the followed storages that a call writes, each once."""
    values = [args[k] if k < len(args) else kwargs.get(name) for k, name in written_arguments(func)]
    return list(dict.fromkeys(storages_in(values, table)))
