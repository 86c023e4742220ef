"""Every operator that a bundle may name, called with hostile values in processes of their own: no signal ever.

A call that torch's own samples of operators make is recorded, some of its arguments are changed (sizes, strides, kinds,
contents, indices far out of range), and the call goes the way of a bundle: as a graph of one operator whose tensors
come from the file. Each tensor ends at a page that cannot be touched, so a read or write behind it is a signal, too.
As a program, `python -m tests.attack.operators SEED CALLS`, it prints its outcome as one line of JSON.
"""

import collections
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.follow_zoo.operators import torch_functions
from port_agent.training.step_values import StepValues
from port_planner.base.errors import PortError
from port_planner.ir.allowed_operators import OperatorError, check_operator
from port_planner.ir.graph import (
    ITEM_BYTES,
    NamedArgument,
    Op,
    Phase,
    Ref,
    Role,
    StepGraph,
    Storage,
    Value,
    verify_graph,
)
from port_planner.ir.operands.verify import verify_operands
from port_planner.ir.torch_operators import resolve
from tests.attack.children import lines_of_child
from tests.attack.outcome import AttackOutcome

_SAMPLES, _CALLS_OF_ONE = 8, 6
"""Samples run of each torch function, and calls kept of each operator."""
_MAX_BYTES = 1 << 16
"""Of a tensor in a recorded call."""
_MEMORY_BYTES = 3 << 30
"""Of a child: sizes that are huge are refused by the allocator, not by the machine."""
_PATIENCE_S = 5
_BATCH = 500
"""Calls in one child."""
_ODD_INTEGERS = (0, 1, -1, 2, 3, 7, 100, -100, 1 << 20, 1 << 31, -(1 << 31), 1 << 40, (1 << 62) - 1, -(1 << 62))
_ODD_NUMBERS = (0.0, -1.0, 0.5, 1e-45, 6e4, float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of a call: a view of a storage whose bytes are these."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    contents: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """An operator and what it is called with: operands, numbers, names of torch's objects, lists of them."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


# -- calls that are right


class _Recorder(TorchDispatchMode):
    """Keeps the calls of allowed operators, a few of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[Call, None]] = collections.defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        try:
            check_operator(name)
            if len(self.calls[name]) < _CALLS_OF_ONE:
                plain = tuple(_recorded(a) for a in args), tuple((k, _recorded(v)) for k, v in (kwargs or {}).items())
                self.calls[name][Call(name, *plain)] = None
        except (OperatorError, ValueError):
            pass
        return func(*args, **(kwargs or {}))


def _recorded(argument: Any) -> Any:
    """Return an argument as a call holds it; raise ValueError for one that no bundle can have."""
    if isinstance(argument, torch.Tensor):
        kind = str(argument.dtype).removeprefix("torch.")
        if argument.layout is not torch.strided or kind not in ITEM_BYTES or argument.nbytes > _MAX_BYTES:
            raise ValueError
        flat = argument.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return Operand(kind, tuple(argument.shape), tuple(torch.empty(argument.shape).stride()), flat)
    if isinstance(argument, list | tuple):
        return tuple(_recorded(a) for a in argument)
    for kind_of in (torch.dtype, torch.device, torch.layout, torch.memory_format):
        if isinstance(argument, kind_of):
            return NamedArgument(kind_of.__name__, str(argument).removeprefix("torch."))
    if argument is None or isinstance(argument, bool | int | float | str):
        return argument
    raise ValueError


def right_calls(functions: Sequence[str] = ()) -> list[Call]:
    """Return calls of the allowed operators that torch's samples of its functions (or these)
    make, forward and backward.
    """
    recorder = _Recorder()
    torch.manual_seed(0)
    for info in torch_functions():
        if torch.float32 not in info.supported_dtypes("cpu") or (functions and info.name not in functions):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in _first(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)):
                _run_sample(info, sample, recorder)
    with recorder:
        for run in _more():
            run()
    calls = [call for name in sorted(recorder.calls) for call in recorder.calls[name]]
    return calls + [call for call in map(_in_place, calls) if call is not None and call.name not in recorder.calls]


def _in_place(call: Call) -> Call | None:
    """Return the same call of the variant that writes into its first operand, where there is one."""
    base, dot, overload = call.name.partition(".")
    name = f"{base}_{dot}{overload}"
    try:
        resolve(name)
    except OperatorError:
        return None
    return Call(name, call.args, call.kwargs)


def _more() -> tuple[Callable[[], Any], ...]:
    """Return functions that call the operators for which torch has no samples."""
    aten = torch.ops.aten
    x, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    volume = torch.randn(1, 2, 3, 4, 5, requires_grad=True)
    q, image, whole = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 6, 6), torch.arange(6)
    k = torch.randn(1, 1, 5, 8, requires_grad=True)
    return (
        lambda: functional.rms_norm(x, (4,), w).sum().backward(),
        lambda: functional.scaled_dot_product_attention(q, q, q).sum().backward(),
        lambda: functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward(),
        lambda: functional.scaled_dot_product_attention(q, q, q, torch.zeros(5, 5)).sum().backward(),
        lambda: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward(),
        lambda: functional.interpolate(image, (4, 4), mode="bicubic", antialias=True),
        *(partial(_pads, volume, mode) for mode in ("reflect", "replicate")),
        *(partial(_resizes, volume, mode) for mode in ("nearest", "nearest-exact", "trilinear")),
        lambda: torch._weight_norm(x, torch.randn(2, 1, 1, requires_grad=True), 0).sum().backward(),
        lambda: aten._weight_norm_interface(x.detach(), torch.randn(2, 1, 1), 0),
        lambda: aten._weight_norm_interface_backward(x.detach(), x.detach(), torch.randn(2, 1, 1), torch.randn(2, 1, 1), 0),
        lambda: aten._fused_rms_norm(x.detach(), (4,), w.detach(), 1e-5),
        lambda: aten.native_dropout(x.detach(), 0.5, True),
        lambda: aten.adaptive_avg_pool1d(x.detach(), (2,)),
        lambda: aten.avg_pool1d(x.detach(), (2,), (2,), (0,)),
        lambda: aten.index_select_backward(torch.randn(2, 4), (5, 4), 0, torch.tensor([1, 4])),
        lambda: (aten.bitwise_or(whole, whole), aten.bitwise_xor(whole, whole), aten.isfinite(image), aten.square(image)),
        lambda: (aten.copy(image, image), aten.argsort(whole), aten.one_hot(whole, 7), aten.rand_like(image)),
        lambda: (aten.randperm(9), aten.random_(image.clone()), aten.index_copy(image, 2, whole, image)),
        lambda: aten.renorm_(torch.randn(3, 4), 2.0, 0, 1.0),
        lambda: aten.embedding_renorm_(torch.randn(5, 4), torch.tensor([1, 4, 1]), 1.0, 2.0),
        lambda: (aten.affine_grid_generator(torch.randn(2, 2, 3), (2, 3, 4, 5), False), aten.affine_grid_generator(torch.randn(1, 3, 4), (1, 2, 3, 4, 5), True)),
        *map(partial(partial, _quantizes), ("tensor", "channel", "number", "moving", "row")),
        lambda: torch.nn.LSTM(4, 3)(x)[0].sum().backward(),
        *(partial(_fused_step, *made) for made in _FUSED),
    )  # fmt: skip


def _quantizes(each: str) -> None:
    x, on, zero = torch.randn(2, 3), torch.ones(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    aten, scale = torch.ops.aten, torch.full((3,), 0.1)
    if each == "tensor":
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, scale[:1], zero[:1], on, 0, 255)
    elif each == "channel":
        aten.fake_quantize_per_channel_affine_cachemask(x, scale, zero, 1, 0, 255)
    elif each == "number":
        aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, 0, 255)
    elif each == "row":
        aten._fused_moving_avg_obs_fq_helper(
            x, on, on, torch.zeros(2), torch.ones(2), scale[:2].clone(), zero[:2].clone(), 0.1, 0, 255, 0, True
        )
    else:
        aten._fused_moving_avg_obs_fq_helper(
            x, on, on, torch.zeros(1), torch.ones(1), scale[:1].clone(), zero[:1].clone(), 0.1, 0, 255, 0
        )


def _pads(volume: torch.Tensor, mode: str) -> None:
    functional.pad(volume, (1,) * 6, mode).sum().backward()


def _resizes(volume: torch.Tensor, mode: str) -> None:
    functional.interpolate(volume, scale_factor=(2, 1.5, 1), mode=mode).sum().backward()


_FUSED: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
)


def _fused_step(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 7))
    parameter.grad = torch.randn(5, 7)
    optimizer: Any = kind
    optimizer([parameter], lr=0.1, fused=True, **settings).step()


def _first(samples: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from (sample for _, sample in zip(range(_SAMPLES), samples, strict=False))
    except (RuntimeError, ImportError, ValueError, TypeError):
        return  # a sample that this machine cannot make


def _run_sample(info: Any, sample: Any, recorder: _Recorder) -> None:
    try:
        with recorder:
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            parts = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
            if parts:
                torch.autograd.backward(parts, [torch.ones_like(t) for t in parts])
    except Exception:
        return  # torch's samples end in whatever they like on this machine; then there is no call to learn from


# -- calls that are not


def hostile(call: Call, rng: random.Random) -> Call:
    """Return the call with one to three of its arguments changed."""
    args, kwargs = list(call.args), [list(pair) for pair in call.kwargs]
    places: list[tuple[list[Any], int]] = [(args, i) for i in range(len(args))] + [(pair, 1) for pair in kwargs]
    for _ in range(rng.choice((1, 1, 2, 3))):
        if places:
            holder, i = rng.choice(places)
            others = [a for other in (args, [v for _, v in kwargs]) for a in other if isinstance(a, Operand)]
            holder[i] = _changed(holder[i], others, rng)
    return Call(call.name, tuple(args), tuple((k, v) for k, v in kwargs))


def _changed(value: Any, others: Sequence[Operand], rng: random.Random) -> Any:
    match value:
        case Operand():
            return rng.choice((_resized, _filled, _filled, _retyped, _strided, _other))(value, others, rng)
        case bool():
            return not value
        case int():
            return rng.choice((*_ODD_INTEGERS, value + 1, value - 1, 2 * value))
        case float():
            return rng.choice(_ODD_NUMBERS)
        case None:
            return rng.choice((None, 0, -1, 1 << 40, 0.5, True, *others[:1]))
        case str():
            return rng.choice(("", "sum", "mean", "max", "none", "x" * 100))
        case NamedArgument(kind="dtype"):
            return NamedArgument("dtype", rng.choice(list(ITEM_BYTES)))
        case tuple():
            match rng.randrange(5):
                case 0:
                    return value[:-1]
                case 1:
                    return (*value, *value[-1:])
                case 2:
                    return ()
                case _ if value:
                    i = rng.randrange(len(value))
                    return (*value[:i], _changed(value[i], others, rng), *value[i + 1 :])
    return value


def _resized(operand: Operand, _: Sequence[Operand], rng: random.Random) -> Operand:
    shape = list(operand.shape)
    i = rng.randrange(len(shape)) if shape else 0
    match rng.randrange(6):
        case 0 if shape:
            del shape[i]
        case 1:
            shape.insert(i, rng.choice((1, 2, 0)))
        case 2 if shape:
            shape[i] = 0
        case 3 if shape:
            shape[i] = 1
        case 4 if shape:
            shape[i] = shape[i] * 2 + 1
        case _ if shape:
            shape[i] = max(0, shape[i] - 1)
    return _dense(operand.dtype, tuple(shape), operand.contents)


def _dense(kind: str, shape: tuple[int, ...], contents: bytes) -> Operand:
    count = 1
    for n in shape:
        count *= n
    if count * ITEM_BYTES[kind] > 16 * _MAX_BYTES:
        shape, count = (1,), 1
    nbytes = count * ITEM_BYTES[kind]
    contents = (contents or b"\1") * (nbytes // max(1, len(contents)) + 1)
    return Operand(kind, shape, tuple(torch.empty(shape, device="meta").stride()), contents[:nbytes])


def _filled(operand: Operand, others: Sequence[Operand], rng: random.Random) -> Operand:
    kind = getattr(torch, operand.dtype)
    flat = torch.frombuffer(bytearray(operand.contents or b"\0" * 16), dtype=torch.uint8).clone().view(kind)
    odd: tuple[Any, ...] = _ODD_NUMBERS if kind.is_floating_point or kind.is_complex else _ODD_INTEGERS
    if kind is torch.bool:
        odd = (True, False)
    limit = torch.iinfo(kind) if odd is _ODD_INTEGERS else None
    chosen = [v if limit is None else max(limit.min, min(limit.max, v)) for v in odd]
    if rng.random() < 0.5:
        flat.fill_(rng.choice(chosen))
    for _ in range(rng.randrange(1, 4)):
        flat[rng.randrange(len(flat))] = rng.choice(chosen)
    contents = flat.view(torch.uint8).numpy().tobytes()[: len(operand.contents)]
    return Operand(operand.dtype, operand.shape, operand.stride, contents)


def _retyped(operand: Operand, _: Sequence[Operand], rng: random.Random) -> Operand:
    return _dense(rng.choice(list(ITEM_BYTES)), operand.shape, operand.contents)


def _strided(operand: Operand, _: Sequence[Operand], rng: random.Random) -> Operand:
    order = list(operand.stride)
    match rng.randrange(3):
        case 0:
            rng.shuffle(order)
        case 1:
            order = [0] * len(order)
        case _ if order:
            order[rng.randrange(len(order))] = rng.choice((0, 1, 2))
    last = sum((n - 1) * k for n, k in zip(operand.shape, order, strict=True)) if 0 not in operand.shape else -1
    if (last + 1) * ITEM_BYTES[operand.dtype] > len(operand.contents):
        return operand
    return Operand(operand.dtype, operand.shape, tuple(order), operand.contents)


def _other(operand: Operand, others: Sequence[Operand], rng: random.Random) -> Operand | None:
    return rng.choice((None, *others)) if others else operand


# -- as a bundle has it


def as_graph(call: Call) -> tuple[StepGraph, list[Operand]]:
    """Return a graph of this call alone, and the contents of its storages; equal operands share one."""
    operands_of: dict[Operand, int] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, Operand):
            return Ref(operands_of.setdefault(value, len(operands_of)))
        return tuple(argument(v) for v in value) if isinstance(value, tuple) else value

    op = Op(
        call.name,
        tuple(argument(a) for a in call.args),
        tuple((k, argument(v)) for k, v in call.kwargs),
        (),
        (),
        Phase.FORWARD,
    )
    op = replace(op, writes=tuple(range(len(operands_of))))
    found = list(operands_of)
    values = tuple(Value(i, o.dtype, o.shape, o.stride, 0) for i, o in enumerate(found))
    storages = tuple(Storage(len(o.contents), Role.BUFFER, str(i)) for i, o in enumerate(found))
    loss = Value(len(found), "float32", (), (), 0)
    graph = StepGraph((*storages, Storage(4, Role.CONSTANT, "loss")), (*values, loss), (op,), (), len(found), (), 0)
    return graph, found


_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def fenced(contents: bytes) -> torch.Tensor:
    """Return the bytes in memory that ends where the next page cannot be touched."""
    if not contents:
        return torch.empty(0, dtype=torch.uint8)
    size = -(-len(contents) // _PAGE) * _PAGE
    area = mmap.mmap(-1, size + _PAGE)
    start = size - len(contents)
    area[start:size] = contents
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    if _libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(_PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(area, dtype=torch.uint8, count=len(contents), offset=start)


def attempt(call: Call) -> str:
    """Load and run one call; return how that ended."""
    graph, found = as_graph(call)
    try:
        verify_graph(graph)
        check_operator(call.name)
        verify_operands(graph)
        values = StepValues(graph)
        for s, operand in enumerate(found):
            values.base[s] = fenced(operand.contents)
        run = values.caller(graph.ops[0], graph.ops[0].args)
    except PortError:
        return "refused when loaded"
    try:
        with torch.no_grad():
            run()
    except PortError:
        return "refused before it is called"
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, OverflowError, MemoryError):
        return "refused by torch"
    return "ran"


# -- in processes of their own


def attack_operators(seed: int, count: int, functions: Sequence[str] = ()) -> AttackOutcome:
    """Make `count` hostile calls of allowed operators: all, or those that these functions of torch make."""
    command = [sys.executable, "-m", "tests.attack.operators", str(seed), str(count), *functions]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    told = json.loads(output.splitlines()[-1])
    return AttackOutcome(told["name"], told["tried"], told["clean"], tuple(told["harmed"]), told["notes"])


def _attack(seed: int, count: int, functions: Sequence[str]) -> AttackOutcome:
    calls = right_calls(functions)
    endings: collections.Counter[str] = collections.Counter()
    harmed: dict[str, list[int]] = collections.defaultdict(list)
    begin = 0
    while begin < count:
        begin = _batch(calls, seed, begin, min(begin + _BATCH, count), endings, harmed)
    clean = count - sum(map(len, harmed.values()))
    bad = tuple(f"{what}: {len(which)}, the first call {which[0]}" for what, which in sorted(harmed.items()))
    notes = ", ".join(f"{n} {ending}" for ending, n in sorted(endings.items()))
    operators = len({call.name for call in calls})
    return AttackOutcome("operators with hostile values", count, clean, bad, f"{operators} operators: {notes}")


def _nth(calls: Sequence[Call], seed: int, i: int) -> Call:
    return hostile(calls[i % len(calls)], random.Random(f"{seed}/{i}"))


def _batch(
    calls: Sequence[Call], seed: int, begin: int, end: int, endings: dict[str, int], harmed: dict[str, list[int]]
) -> int:
    """Make calls `begin` to `end` in a child, which may die of one; return the first that was not made."""
    made, status = lines_of_child(partial(_child, calls, seed, begin, end))
    for ending in made:
        endings[ending] += 1
    if status == 0:
        return end
    last = begin + len(made)
    if status == -signal.SIGALRM:
        endings[f"stopped after {_PATIENCE_S} s"] += 1
    else:
        what = f"signal {-status}" if status < 0 else f"exit status {status}"
        harmed[f"{calls[last % len(calls)].name} {what}"].append(last)
    return last + 1


def _child(calls: Sequence[Call], seed: int, begin: int, end: int, fd: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what torch warns of on its way is no news
    for i in range(begin, end):
        call = _nth(calls, seed, i)
        signal.alarm(_PATIENCE_S)
        os.write(fd, f"{attempt(call)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    outcome = _attack(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    print(json.dumps(asdict(outcome)))
