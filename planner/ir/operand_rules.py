"""What operators do not check themselves.

Torch trusts autograd to call them with tensors that fit each other.

A bundle may call them with anything, and these read or write out of bounds then. What they are called with is checked
here, by the layouts that the graph declares; indices whose values nobody checks must be those that the operator's own
forward pass made or took, or a copy of them. The list is what `tests/attack/operators.py` found in torch 2.13.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from planner.ir.devices.transfers import transfer_of
from planner.ir.graph import Argument, GraphError, Op, Ref, StepGraph, Value

Shape = tuple[int, ...]

_COPY, _COUNTED = "aten::clone", "aten::arange.start_step"

_NORMALIZATIONS = 3
"""Ways to scale a Fourier transform: not, by the root of the size, by the size (`fft_norm_mode` of ATen)."""

_LSTM_MODE, _LSTM_GATES, _MOST_LAYERS = 2, 4, 1 << 16
"""The one kind of recurrent layer that torch hands to oneDNN, and the gates of a cell (`ideep::rnn_kind` LSTM)."""
_LSTM_NUMBERS = ("float32", "bfloat16")
"""What all of a layer's tensors consist of."""
_LSTM_FLAGS = ("reverse", "has_biases", "bidirectional", "batch_first", "train")


@dataclass(frozen=True)
class _Call:
    """An operator of a graph and what it is called with, by the names of its parameters."""

    graph: "_Writers"
    index: int
    arguments: Mapping[str, Argument]

    def value(self, name: str) -> Value | None:
        argument = self.arguments.get(name)
        return self.graph.graph.values[argument.value] if isinstance(argument, Ref) else None

    def shape(self, name: str) -> Shape:
        """Return the shape of an operand that must be there."""
        value = self.value(name)
        if value is None:
            raise _UnfitError
        return value.shape

    def sizes(self, name: str) -> Shape:
        """Return an argument that is a list of sizes."""
        argument = self.arguments.get(name)
        if not isinstance(argument, tuple):
            raise _UnfitError
        return tuple(_whole(n) for n in argument)

    def listed(self, name: str, count: int | None = None) -> list[Value]:
        """Return the operands of an argument that is a list of tensors, so many where a `count` is given."""
        argument = self.arguments.get(name)
        if not isinstance(argument, tuple) or len(argument) != (len(argument) if count is None else count):
            raise _UnfitError
        if not all(isinstance(part, Ref) for part in argument):
            raise _UnfitError
        return [self.graph.graph.values[part.value] for part in argument if isinstance(part, Ref)]

    def size(self, name: str) -> int:
        return _whole(self.arguments.get(name))

    def all_of(self, names: str, shape: Shape) -> bool:
        """Say whether every one of these operands that is there has this shape."""
        return all(self.shape(n) == shape for n in names.split() if self.arguments.get(n) is not None)

    def made_by(self, name: str, forward: str, output: int) -> "_Call":
        """Return the earlier call whose output this operand is, or a copy of it, never written since."""
        for wanted in self._copied(name):
            for i, op in enumerate(self.graph.graph.ops[: self.index]):
                if _base(op) == forward and len(op.outputs) > output:
                    v = op.outputs[output]
                    made = v is not None and self.graph.graph.values[v] == wanted
                    if made and self.graph.touching[wanted.storage] == [i]:
                        return _call(self.graph, i)
        raise _UnfitError

    def taken_by(self, name: str, forward: str) -> list["_Call"]:
        """Return the earlier calls that took this operand, or what it is a copy of, under the same name.

        Where it was not written since.
        """
        ops = self.graph.graph.ops
        found = list[_Call]()
        for wanted in self._copied(name):
            last = max(self.graph.touching[wanted.storage], default=-1)
            calls = [_call(self.graph, i) for i in range(last + 1, self.index) if _base(ops[i]) == forward]
            found += [call for call in calls if call.value(name) == wanted]
        return found

    def _copied(self, name: str) -> Iterator[Value]:
        """Yield an operand, what it is a copy of, and so on: hooks on saved tensors may hand copies to the backward pass."""
        value, before = self.value(name), self.index
        if value is None:
            raise _UnfitError
        yield value
        while (made := self.graph.copy_of(value, before)) is not None:
            value, before = made
            yield value


class _UnfitError(Exception):
    """What an operator is called with does not fit; `verify_operands` says it with all there is to say."""


class _Writers:
    """A graph, and which of its operators make or change each storage."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph

    @cached_property
    def touching(self) -> list[list[int]]:
        touching: list[list[int]] = [[] for _ in self.graph.storages]
        for i, op in enumerate(self.graph.ops):
            made = {self.graph.values[v].storage for v in op.outputs if v is not None}
            for s in made | set(op.writes):
                touching[s].append(i)
        return touching

    def copy_of(self, value: Value, before: int) -> tuple[Value, int] | None:
        """Return what a value is a copy of and the operator, ahead of `before`, that made it; None where none did.

        Nothing else writes the copy, and nothing writes what it was made of any more.
        """
        touching = self.touching[value.storage]
        op = self.graph.ops[touching[0]] if len(touching) == 1 and touching[0] < before else None
        if op is not None and (moved := transfer_of(self.graph, op)) is not None:
            unchanged = max(self.touching[moved.source], default=-1) < touching[0]
            return (replace(value, storage=moved.source), touching[0]) if unchanged else None
        if op is None or op.name != _COPY or op.outputs[0] is None or self.graph.values[op.outputs[0]] != value:
            return None
        if not isinstance(op.args[0], Ref):
            return None
        source = self.graph.values[op.args[0].value]
        unchanged = max(self.touching[source.storage], default=-1) < touching[0]
        alike = (source.shape, source.dtype) == (value.shape, value.dtype)
        return (source, touching[0]) if unchanged and alike else None


def _whole(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or abs(number) > 1 << 40:
        raise _UnfitError
    return number


# -- one function per family of operators: does the call fit?


def _same_shapes(call: _Call) -> bool:
    return call.shape("grad_output") == call.shape("output")


def _gelu(call: _Call) -> bool:
    """oneDNN's kernel reads as many gradients as there are inputs."""
    return call.shape("grad_output") == call.shape("self")


def _batch_norm(call: _Call) -> bool:
    shape = call.shape("input")
    if len(shape) < 2 or 0 in shape:
        return False
    training = call.arguments.get("training", call.arguments.get("train"))
    running, saved = "running_mean running_var", "save_mean save_invstd"
    needed = running if not training else saved if "train" in call.arguments else ""
    there = all(call.shape(name) == shape[1:2] for name in needed.split())
    one_each = f"weight bias {running} {saved if training else ''}"
    return there and call.all_of(one_each, shape[1:2]) and call.all_of("grad_out", shape)


def _cudnn_batch_norm_backward(call: _Call) -> bool:
    shape = call.shape("input")
    if len(shape) < 2 or 0 in shape:
        return False
    saved = all(call.shape(name) == shape[1:2] for name in ("save_mean", "save_invstd"))
    return saved and call.all_of("weight running_mean running_var", shape[1:2]) and call.shape("grad_out") == shape


def _layer_norm_backward(call: _Call) -> bool:
    shape, inner = call.shape("input"), call.sizes("normalized_shape")
    rows = math.prod(shape[: len(shape) - len(inner)])
    return (
        call.shape("grad_out") == shape and shape[len(shape) - len(inner) :] == inner and bool(inner)
        and math.prod(call.shape("mean")) == math.prod(call.shape("rstd")) == rows and call.all_of("weight bias", inner)
    )  # fmt: skip


def _weight_norm(call: _Call) -> bool:
    v, backward = "v" if "v" in call.arguments else "saved_v", "saved_v" in call.arguments
    shape, dim = call.shape(v), call.size("dim") if "dim" in call.arguments else 0
    if len(shape) < 1 or 0 in shape or dim not in (0, len(shape) - 1):
        return False
    norms = tuple(n if i == dim else 1 for i, n in enumerate(shape))
    return call.all_of("g saved_g saved_norms", norms) and (not backward or call.shape("grad_w") == shape)


def _attention(call: _Call) -> bool:
    q, k, v = (call.shape(name) for name in ("query", "key", "value"))
    if {len(q), len(k), len(v)} != {4} or 0 in (*q, *k, *v):
        return False
    fits = q[0] == k[0] and k == v and q[3] == k[3] and q[1] % k[1] == 0
    if call.arguments.get("attn_mask") is not None:
        mask, wanted = call.shape("attn_mask"), (q[0], q[1], q[2], k[2])
        fits &= len(mask) in (2, 4) and all(n in (1, m) for n, m in zip(mask[::-1], wanted[::-1], strict=False))
    rows = ("query", "key", "value", "out")
    dense = all(value.stride[-1] == 1 for name in rows if (value := call.value(name)) is not None)
    return fits and dense and call.all_of("grad_out out", q) and call.all_of("logsumexp", q[:3])


def _padded_attention(call: _Call) -> bool:
    """As `_attention`, of kernels that keep the logarithms in rows of a length of their own, which they check."""
    rows = call.shape("logsumexp")[:2] == call.shape("query")[:2]
    return rows and _attention(replace(call, arguments={**call.arguments, "logsumexp": None}))


def _adaptive_average(spatial: int) -> Callable[[_Call], bool]:
    def fits(call: _Call) -> bool:
        grad, shape = call.shape("grad_output"), call.shape("self")
        outer = len(shape) - spatial
        return (
            outer in (1, 2) and len(grad) == len(shape) and grad[:outer] == shape[:outer] and 0 not in (*grad, *shape)
        )

    return fits


def _average_pool(spatial: int) -> Callable[[_Call], bool]:
    def fits(call: _Call) -> bool:
        grad, shape = call.shape("grad_output"), call.shape("self")
        return len(grad) == len(shape) and grad[: len(shape) - spatial] == shape[: len(shape) - spatial]

    return fits


def _padding(spatial: int, *, reflection: bool) -> Callable[[_Call], bool]:
    def fits(call: _Call) -> bool:
        grad, shape, pads = call.shape("grad_output"), call.shape("self"), call.sizes("padding")
        if len(pads) != 2 * spatial or len(shape) - spatial not in (1, 2) or 0 in shape:
            return False
        inner = shape[len(shape) - spatial :]
        pairs = [(pads[2 * i], pads[2 * i + 1]) for i in reversed(range(spatial))]
        if reflection and any(min(pair) < 0 or max(pair) >= n for pair, n in zip(pairs, inner, strict=True)):
            return False
        padded = tuple(n + sum(pair) for n, pair in zip(inner, pairs, strict=True))
        return grad == (*shape[: len(shape) - spatial], *padded) and min(padded) > 0

    return fits


def _grid_sampler(spatial: int) -> Callable[[_Call], bool]:
    """Reflection at the border (padding mode 2) takes coordinates that are infinite for pixels."""

    def fits(call: _Call) -> bool:
        image, grid = call.shape("input"), call.shape("grid")
        alike = len(image) == len(grid) == spatial + 2 and 0 not in image and call.size("padding_mode") in (0, 1)
        return alike and call.all_of("grad_output", (*image[:2], *grid[1:-1]))

    return fits


def _max_pool(forward: str) -> Callable[[_Call], bool]:
    def fits(call: _Call) -> bool:
        made = call.made_by("indices", forward, 1)
        return made.shape("self") == call.shape("self") and call.shape("grad_output") == call.shape("indices")

    return fits


def _nll_loss(forward: str) -> Callable[[_Call], bool]:
    """The forward pass checks every label; the backward pass none."""

    def fits(call: _Call) -> bool:
        plain = ("ignore_index", "reduction")
        checked = [
            f for f in call.taken_by("target", forward)
            if f.shape("self") == call.shape("self") and all(f.arguments.get(n) == call.arguments.get(n) for n in plain)
        ]  # fmt: skip
        classes, rows = call.shape("self")[-1 if forward == "nll_loss_forward" else 1], call.shape("target")
        grad = rows if call.arguments.get("reduction") == 0 else ()
        seen = bool(checked) or (forward == "nll_loss_forward" and _labels_seen_in_pieces(call))
        return (
            seen and call.all_of("weight", (classes,)) and call.shape("grad_output") == grad
            and math.prod(call.shape("total_weight")) == 1
        )  # fmt: skip

    return fits


def _labels_seen_in_pieces(call: _Call) -> bool:
    """Say whether these labels, a piece of all, were checked as `planner.slices.pieces` has them checked.

    `gather` with the labels that are not negative raises where one is no column; a loss of one class, of the labels that
    are, raises where one is not to be ignored.
    """
    wanted, classes = call.value("target"), call.shape("self")
    if wanted is None or len(wanted.shape) != 1 or wanted.stride != (1,):
        return False
    begin = max(call.graph.touching[wanted.storage], default=-1) + 1
    gathered, ignored = list[Value](), False
    for i in range(begin, call.index):
        taken = _outcome(call.graph, i, "aten::clamp_min")
        if taken is not None and _gathers(call, i, taken[1], (*taken[0].shape, *classes[1:])):
            gathered.append(taken[0])
        taken = _outcome(call.graph, i, "aten::clamp_max")
        ignored = ignored or (taken is not None and _lies_in(wanted, taken[0]) and _ignores(call, i, taken[1]))
    return ignored and _covered(wanted, gathered)


def _covered(wanted: Value, pieces: list[Value]) -> bool:
    """Say whether pieces of the same row of elements, taken together, hold all of one."""
    reached, end = wanted.offset, wanted.offset + wanted.shape[0]
    alike = [p for p in pieces if (p.storage, p.dtype, p.stride) == (wanted.storage, wanted.dtype, wanted.stride)]
    for piece in sorted(alike, key=lambda p: p.offset):
        if piece.offset <= reached:
            reached = max(reached, piece.offset + piece.shape[0])
    return reached >= end


def _outcome(graph: _Writers, i: int, name: str) -> tuple[Value, Value] | None:
    """Return what op `i` bounds by 0, and the result, where it is this operator and nothing else writes the result."""
    op, values = graph.graph.ops[i], graph.graph.values
    if op.name != name or op.kwargs or len(op.args) != 2 or op.args[1] != 0 or isinstance(op.args[1], bool):
        return None
    source, result = op.args[0], op.outputs[0]
    if not isinstance(source, Ref) or result is None or graph.touching[values[result].storage] != [i]:
        return None
    return values[source.value], values[result]


def _gathers(call: _Call, after: int, index: Value, table: Shape) -> bool:
    column = Value(index.storage, index.dtype, (*index.shape, 1), (1, 1), 0)
    values = call.graph.graph.values
    return index.offset == 0 and any(
        op.name == "aten::gather" and op.args[1] == 1
        and [values[a.value] for a in op.args if isinstance(a, Ref)][1:] == [column]
        and isinstance(op.args[0], Ref) and values[op.args[0].value].shape == table
        for op in call.graph.graph.ops[after : call.index]
    )  # fmt: skip


def _ignores(call: _Call, after: int, target: Value) -> bool:
    for i in range(after, call.index):
        if call.graph.graph.ops[i].name == "aten::nll_loss_forward":
            loss = _call(call.graph, i)
            rows = loss.shape("self")
            alike = all(loss.arguments.get(n) == call.arguments.get(n) for n in ("ignore_index", "reduction"))
            if loss.value("target") == target and alike and rows == (*target.shape, 1):
                return True
    return False


def _lies_in(piece: Value, whole: Value) -> bool:
    """Say whether a row of elements is a stretch of another."""
    alike = (piece.storage, piece.dtype, piece.stride) == (whole.storage, whole.dtype, whole.stride)
    return alike and whole.offset <= piece.offset and piece.offset + piece.shape[0] <= whole.offset + whole.shape[0]


def _embedding(call: _Call) -> bool:
    """The forward pass checks every index, or two operators have bounded each; the backward pass checks none."""
    rows = call.size("num_weights")
    checked = [f for f in call.taken_by("indices", "embedding") if f.shape("weight")[:1] == (rows,)]
    return (bool(checked) or _within(call, "indices", rows)) and call.shape("grad_output")[:-1] == call.shape("indices")


def _within(call: _Call, name: str, rows: int) -> bool:
    """Say whether each of these numbers is 0 or more and less than `rows`, by the two operators that made them."""
    upper = _bounded(call, call.value(name), "aten::clamp_max")
    lower = None if upper is None else _bounded(call, upper[0], "aten::clamp_min")
    return upper is not None and lower is not None and lower[1] == 0 <= upper[1] < rows


def _bounded(call: _Call, value: Value | None, name: str) -> tuple[Value, int] | None:
    """Return what a value was made of by this operator with one whole number, and the number; None where it was not.

    Nothing else writes the value.
    """
    made = [] if value is None else call.graph.touching[value.storage]
    op = call.graph.graph.ops[made[0]] if len(made) == 1 and made[0] < call.index else None
    if op is None or op.name != name or op.kwargs or len(op.args) != 2 or op.outputs[0] is None:
        return None
    source, number = op.args
    if call.graph.graph.values[op.outputs[0]] != value or not isinstance(source, Ref):
        return None
    return call.graph.graph.values[source.value], _whole(number)


def _embedding_bag(call: _Call) -> bool:
    """Where bags begin is not checked by the kernel: here they are all as long, as `arange` counts for indices in rows."""
    (count,), offsets = call.shape("indices"), call.value("offsets")
    made = [] if offsets is None else call.graph.touching[offsets.storage]
    op = call.graph.graph.ops[made[0]] if len(made) == 1 and made[0] < call.index else None
    if op is None or op.name != _COUNTED or op.outputs[0] is None or call.graph.graph.values[op.outputs[0]] != offsets:
        return False
    first, end, length = map(_whole, op.args)
    return first == 0 < length and 0 < end <= count and call.all_of("per_sample_weights", (count,))


def _embedding_bag_backward(call: _Call) -> bool:
    """The forward pass checks indices and offsets, and says which bag each index is of; the backward pass takes what it made."""
    made = call.made_by("offset2bag", "_embedding_bag", 1)
    weight, mode = made.shape("weight"), call.size("mode")
    taken = all(
        made.index in [c.index for c in call.taken_by(name, "_embedding_bag")] for name in ("indices", "offsets")
    )
    if "num_weights" in call.arguments:
        outputs = {"bag_size": 2, "maximum_indices": 3}
        counted = all(call.made_by(name, "_embedding_bag", o).index == made.index for name, o in outputs.items())
        taken = taken and counted and call.size("num_weights") == weight[0] and call.arguments.get("sparse") is False
    same = mode == made.arguments.get("mode", 0) and call.arguments.get("padding_idx", -1) == made.arguments.get(
        "padding_idx", -1
    )
    result = call.graph.graph.ops[made.index].outputs[0]
    bags = None if result is None else call.graph.graph.values[result].shape
    return (
        taken and same and call.shape("grad") == bags and call.all_of("weight", weight)
        and call.all_of("per_sample_weights", made.shape("indices"))
    )  # fmt: skip


def _margin_loss(call: _Call) -> bool:
    """A loss of every row has a gradient for each, others one."""
    every = call.arguments.get("reduction", 1) == 0
    return math.prod(call.shape("grad_output")) == (math.prod(call.shape("self")[:-1]) if every else 1)


def _distances(call: _Call) -> bool:
    one, other, grad = call.shape("x1"), call.shape("x2"), call.shape("grad")
    batch = [*zip_longest(one[-3::-1], other[-3::-1], fillvalue=1)]
    alike = min(len(one), len(other)) > 1 and one[-1] == other[-1] and call.shape("cdist") == grad
    wanted = tuple(max(pair) if 0 not in pair else 0 for pair in batch)[::-1]
    broadcasts = all(a == b or 1 in (a, b) for a, b in batch)
    return alike and broadcasts and grad == (*wanted, one[-2], other[-2])


def _distances_of_pairs(call: _Call) -> bool:
    rows, _ = call.shape("self")
    return rows > 0 and call.shape("grad") == call.shape("pdist") == (rows * (rows - 1) // 2,)


def _ctc_loss(call: _Call) -> bool:
    """The forward pass checks lengths, and labels are checked before it; the backward pass takes what was checked."""
    made, likelihood = call.made_by("log_alpha", "_ctc_loss", 1), call.made_by("neg_log_likelihood", "_ctc_loss", 0)
    lengths = ("input_lengths", "target_lengths")
    given = [call.taken_by(name, "_ctc_loss") for name in ("targets", *lengths) if call.value(name) is not None]
    listed = [(call.arguments.get(name), made.arguments.get(name)) for name in lengths if call.value(name) is None]
    return (
        likelihood.index == made.index and all(made.index in [c.index for c in taken] for taken in given)
        and all(mine == its for mine, its in listed) and call.arguments.get("blank") == made.arguments.get("blank", 0)
        and call.shape("log_probs") == made.shape("log_probs")
        and call.shape("grad") == call.shape("neg_log_likelihood")
    )  # fmt: skip


def _unfold(call: _Call) -> bool:
    shape, dim = call.sizes("input_sizes"), call.size("dim")
    size, step = call.size("size"), call.size("step")
    dim += len(shape) if dim < 0 else 0
    if not 0 <= dim < len(shape) or step < 1 or not 0 < size <= shape[dim] or min(shape) < 1:
        return False
    return call.shape("grad_in") == (*shape[:dim], (shape[dim] - size) // step + 1, *shape[dim + 1 :], size)


def _fourier(call: _Call) -> bool:
    """Dimensions are trusted to be there, each once, and the half that a real result is made of to be as long as it says."""
    shape, dims = call.shape("self"), call.sizes("dim")
    there = bool(dims) and 0 not in shape and all(0 <= d < len(shape) for d in dims) and len({*dims}) == len(dims)
    if not there or call.size("normalization") not in range(_NORMALIZATIONS):
        return False
    if "last_dim_size" not in call.arguments:
        return True
    size = call.size("last_dim_size")
    return size >= 1 and shape[dims[-1]] == size // 2 + 1


def _lstm(call: _Call) -> bool:
    """Return whether a layer of oneDNN's LSTM fits: it reads all but the gradients as dense rows of the sizes that it is told."""
    backward = "workspace" in call.arguments
    first, *weights = ("weight1 weight2 weight3 weight4" if backward else "weight0 weight1 weight2 weight3").split()
    states = "hx_ cx_tmp" if backward else "hx_ cx_"
    (length, rows, width), hidden = call.shape("input"), call.size("hidden_size")
    gates = _LSTM_GATES * hidden
    told = call.arguments.get("has_biases") is True
    biases = ((gates,), (gates,)) if told else ((gates, width), (gates, hidden))
    sizes = {"input": (length, rows, width), first: (gates, width), weights[0]: (gates, hidden)}
    sizes |= dict(zip(weights[1:], biases, strict=True)) | dict.fromkeys(states.split(), (rows, hidden))
    if backward:
        sizes |= {"output": (length, rows, hidden), "hy_": (rows, hidden), "cy_": (rows, hidden)}
    kind = _kind_of(call, "input")
    return (
        kind in _LSTM_NUMBERS and min(length, rows, width, hidden) > 0 and call.size("mode") == _LSTM_MODE and call.arguments.get("batch_sizes") == ()
        and all(isinstance(call.arguments.get(n), bool) for n in _LSTM_FLAGS) and 0 < call.size("num_layers") <= _MOST_LAYERS
        and all(call.shape(n) == size and _dense_rows(call.value(n)) and _kind_of(call, n) == kind for n, size in sizes.items())
        and (not backward or _lstm_of_forward(call, sizes))
    )  # fmt: skip


def _lstm_of_forward(call: _Call, sizes: Mapping[str, Shape]) -> bool:
    """Say whether a backward pass reads the workspace of a forward pass that was called with the same sizes."""
    made = call.made_by("workspace", "mkldnn_rnn_layer", 3)
    alike = (*_LSTM_FLAGS, "mode", "hidden_size", "num_layers", "batch_sizes")
    return (
        call.arguments.get("train") is True and all(call.arguments.get(n) == made.arguments.get(n) for n in alike)
        and _lstm(made) and made.shape("input") == sizes["input"] and call.shape("grad_output") == sizes["output"]
        and call.all_of("grad_hy grad_cy", sizes["hy_"])
        and {_kind_of(call, n) for n in ("grad_output", "grad_hy", "grad_cy")} <= {_kind_of(made, "input"), None}
        and _kind_of(call, "input") == _kind_of(made, "input")
    )  # fmt: skip


def _kind_of(call: _Call, name: str) -> str | None:
    value = call.value(name)
    return None if value is None else value.dtype


def _dense_rows(value: Value | None) -> bool:
    """Say whether a tensor's numbers lie one behind the other, in the order of its dimensions."""
    size = 1
    for n, stride in zip(*((value.shape[::-1], value.stride[::-1]) if value is not None else ((), ())), strict=True):
        if n != 1 and stride != size:
            return False
        size *= n
    return value is not None


def _fused_update(states: str) -> Callable[[_Call], bool]:
    """One parameter, its gradient and states, which are as large and lie the same way; a count of steps is one number."""

    def fits(call: _Call) -> bool:
        (parameter,) = call.listed("self")
        wanted = ["grads", *states.split(), *(["max_exp_avg_sqs"] if call.arguments.get("amsgrad") is True else [])]
        alike = [value for name in wanted for value in call.listed(name, 1)]
        counts = [] if "momentum_buffer_list" in wanted else call.listed("state_steps", 1)
        return (
            _dense(parameter) and all(_lies_as(value, parameter) for value in alike)
            and all(count.shape == () and count.dtype == "float32" for count in counts)
            and (call.arguments.get("amsgrad") is True or not call.arguments.get("max_exp_avg_sqs"))
            and call.arguments.get("grad_scale") is None and call.arguments.get("found_inf") is None
        )  # fmt: skip

    return fits


def _lies_as(one: Value, other: Value) -> bool:
    return (one.dtype, one.shape, one.stride) == (other.dtype, other.shape, other.stride)


def _dense(value: Value) -> bool:
    """Say whether a tensor fills a piece of memory, each element once, in whatever order."""
    size = 1
    for stride, n in sorted(zip(value.stride, value.shape, strict=True)):
        if n != 1 and stride != size:
            return False
        size *= n
    return size > 0


_SCALES = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}
"""How operators name what sizes are scaled by, by the number of dimensions."""


def _upsampled(spatial: int) -> Callable[[_Call], bool]:
    """A scale beside the sizes must be about what they say: source indices are computed with it."""

    def fits(call: _Call) -> bool:
        source = call.sizes("input_size") if "input_size" in call.arguments else call.shape("self")
        target = call.sizes("output_size")
        sizes = zip(source[-spatial:], target, map(call.arguments.get, _SCALES[spatial]), strict=False)
        return len(source) == spatial + 2 and len(target) == spatial and all(
            scale is None or (isinstance(scale, int | float) and math.isfinite(scale) and scale > 0 and out <= scale * n + 1)
            for n, out, scale in sizes
        )  # fmt: skip

    return fits


_UPSAMPLE = {
    1: ("nearest1d", "nearest_exact1d", "linear1d"),
    2: ("nearest2d", "nearest_exact2d", "bilinear2d", "bilinear2d_aa", "bicubic2d", "bicubic2d_aa"),
    3: ("nearest3d", "nearest_exact3d", "trilinear3d"),
}


def _upsample_rules() -> dict[str, tuple[str, Callable[[_Call], bool]]]:
    rules = {}
    for spatial, kinds in _UPSAMPLE.items():
        scales = " ".join(_SCALES[spatial])
        for kind in kinds:
            corners = "" if kind.startswith("nearest") else "align_corners "
            hidden = "_" if kind.endswith("_aa") or "exact" in kind else ""
            name = f"{hidden}upsample_{kind}"
            rules[name] = (f"self output_size {corners}{scales}", _upsampled(spatial))
            rules[f"{name}_backward"] = (f"grad_output output_size input_size {corners}{scales}", _upsampled(spatial))
    return rules


_POOL = "grad_output self kernel_size stride padding dilation ceil_mode indices"
_POOLED = "self kernel_size stride padding dilation ceil_mode"
_AVERAGE = "grad_output self kernel_size stride padding ceil_mode count_include_pad divisor_override"
_FRACTIONAL = "self kernel_size output_size"
_GRID = "input grid interpolation_mode padding_mode align_corners"
_LOSS = "self target weight reduction ignore_index"
_BAG = "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
_BAGS = "indices offsets offset2bag"
_CTC = "log_probs targets input_lengths target_lengths blank zero_infinity"
_NORMED = "input weight bias running_mean running_var training momentum eps"
_SEQUENCES = "cum_seq_q cum_seq_k max_q max_k"
_ATTENDED = "query key value dropout_p is_causal attn_mask scale"

_LSTM = "input weight0 weight1 weight2 weight3 hx_ cx_ reverse batch_sizes mode hidden_size num_layers has_biases bidirectional batch_first train"
_LSTM_BACKWARD = (
    "input weight1 weight2 weight3 weight4 hx_ cx_tmp output hy_ cy_ grad_output grad_hy grad_cy reverse mode hidden_size "
    "num_layers has_biases train bidirectional batch_sizes batch_first workspace"
)

_ADAM = "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps"

_RULES: dict[str, tuple[str, Callable[[_Call], bool]]] = {
    "_log_softmax_backward_data": ("grad_output output dim input_dtype", _same_shapes),
    "_softmax_backward_data": ("grad_output output dim input_dtype", _same_shapes),
    "gelu_backward": ("grad_output self approximate", _gelu),
    "native_batch_norm": (_NORMED, _batch_norm),
    "native_batch_norm_backward": (
        "grad_out input weight running_mean running_var save_mean save_invstd train eps output_mask", _batch_norm
    ),
    "cudnn_batch_norm": (_NORMED, _batch_norm),
    "cudnn_batch_norm_backward": (
        "input grad_out weight running_mean running_var save_mean save_invstd eps reserve", _cudnn_batch_norm_backward
    ),
    "_scaled_dot_product_flash_attention": (
        "query key value dropout_p is_causal return_debug_mask", _attention
    ),
    "_scaled_dot_product_flash_attention_backward": (
        f"grad_out query key value out logsumexp {_SEQUENCES} dropout_p is_causal philox_seed philox_offset", _attention
    ),
    "_scaled_dot_product_efficient_attention": (
        "query key value attn_mask compute_log_sumexp dropout_p is_causal", _attention
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "grad_out query key value attn_mask out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal",
        _padded_attention,
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_mask compute_log_sumexp dropout_p is_causal return_debug_mask", _attention
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        f"grad_out query key value out logsumexp philox_seed philox_offset attn_mask {_SEQUENCES} dropout_p is_causal",
        _padded_attention,
    ),
    "native_layer_norm_backward": (
        "grad_out input normalized_shape mean rstd weight bias output_mask", _layer_norm_backward
    ),
    "_weight_norm_interface": ("v g dim", _weight_norm),
    "_weight_norm_interface_backward": ("grad_w saved_v saved_g saved_norms dim", _weight_norm),
    "_scaled_dot_product_flash_attention_for_cpu": (_ATTENDED, _attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale", _attention
    ),
    "_adaptive_avg_pool2d_backward": ("grad_output self", _adaptive_average(2)),
    "_adaptive_avg_pool3d_backward": ("grad_output self", _adaptive_average(3)),
    "avg_pool2d_backward": (_AVERAGE, _average_pool(2)),
    "avg_pool3d_backward": (_AVERAGE, _average_pool(3)),
    "reflection_pad1d_backward": ("grad_output self padding", _padding(1, reflection=True)),
    "reflection_pad2d_backward": ("grad_output self padding", _padding(2, reflection=True)),
    "reflection_pad3d_backward": ("grad_output self padding", _padding(3, reflection=True)),
    "replication_pad1d_backward": ("grad_output self padding", _padding(1, reflection=False)),
    "replication_pad2d_backward": ("grad_output self padding", _padding(2, reflection=False)),
    "replication_pad3d_backward": ("grad_output self padding", _padding(3, reflection=False)),
    "grid_sampler_2d": (_GRID, _grid_sampler(2)),
    "grid_sampler_2d_backward": (f"grad_output {_GRID} output_mask", _grid_sampler(2)),
    "grid_sampler_3d": (_GRID, _grid_sampler(3)),
    "grid_sampler_3d_backward": (f"grad_output {_GRID} output_mask", _grid_sampler(3)),
    "max_pool2d_with_indices_backward": (_POOL, _max_pool("max_pool2d_with_indices")),
    "max_pool3d_with_indices_backward": (_POOL, _max_pool("max_pool3d_with_indices")),
    "adaptive_max_pool2d_backward": ("grad_output self indices", _max_pool("adaptive_max_pool2d")),
    "adaptive_max_pool3d_backward": ("grad_output self indices", _max_pool("adaptive_max_pool3d")),
    "fractional_max_pool2d_backward": (f"grad_output {_FRACTIONAL} indices", _max_pool("fractional_max_pool2d")),
    "fractional_max_pool3d_backward": (f"grad_output {_FRACTIONAL} indices", _max_pool("fractional_max_pool3d")),
    "nll_loss_backward": (f"grad_output {_LOSS} total_weight", _nll_loss("nll_loss_forward")),
    "nll_loss2d_backward": (f"grad_output {_LOSS} total_weight", _nll_loss("nll_loss2d_forward")),
    "embedding_dense_backward": ("grad_output indices num_weights padding_idx scale_grad_by_freq", _embedding),
    "_embedding_bag_backward": (
        f"grad {_BAGS} bag_size maximum_indices num_weights scale_grad_by_freq mode sparse per_sample_weights padding_idx",
        _embedding_bag_backward,
    ),
    "_embedding_bag_per_sample_weights_backward": (f"grad weight {_BAGS} mode padding_idx", _embedding_bag_backward),
    "_embedding_bag": (_BAG, _embedding_bag),
    "multi_margin_loss_backward": ("grad_output self target p margin weight reduction", _margin_loss),
    "multilabel_margin_loss_backward": ("grad_output self target reduction is_target", _margin_loss),
    "_ctc_loss_backward": (
        "grad log_probs targets input_lengths target_lengths neg_log_likelihood log_alpha blank zero_infinity", _ctc_loss
    ),
    "unfold_backward": ("grad_in input_sizes dim size step", _unfold),
    "_fft_c2c": ("self dim normalization forward", _fourier),
    "_fft_r2c": ("self dim normalization onesided", _fourier),
    "_fft_c2r": ("self dim normalization last_dim_size", _fourier),
    "_fused_adam_": (_ADAM, _fused_update("exp_avgs exp_avg_sqs")),
    "_fused_adamw_": (_ADAM, _fused_update("exp_avgs exp_avg_sqs")),
    "_fused_adagrad_": ("self grads state_sums state_steps", _fused_update("state_sums")),
    "_fused_sgd_": ("self grads momentum_buffer_list", _fused_update("momentum_buffer_list")),
    "mkldnn_rnn_layer": (_LSTM, _lstm),
    "mkldnn_rnn_layer_backward": (_LSTM_BACKWARD, _lstm),
    "_pdist_forward": ("self p", lambda call: len(call.shape("self")) == 2),
    "_pdist_backward": ("grad self p pdist", _distances_of_pairs),
    "_cdist_backward": ("grad x1 x2 p cdist", _distances),
    **_upsample_rules(),
}  # fmt: skip

_SAME_PARAMETERS = ("aten::_ctc_loss_backward.Tensor",)
"""Overloads that take what the operator without a suffix takes."""

_FORWARD = {
    "max_pool2d_with_indices": _POOLED,
    "max_pool3d_with_indices": _POOLED,
    "adaptive_max_pool2d": "self output_size",
    "adaptive_max_pool3d": "self output_size",
    "fractional_max_pool2d": f"{_FRACTIONAL} random_samples",
    "fractional_max_pool3d": f"{_FRACTIONAL} random_samples",
    "nll_loss_forward": _LOSS,
    "nll_loss2d_forward": _LOSS,
    "_ctc_loss": _CTC,
    "embedding": "weight indices padding_idx scale_grad_by_freq sparse",
}
"""Parameters of the operators whose indices another takes over."""


def verify_operands(graph: StepGraph) -> None:
    """Raise GraphError where an operator would be called with operands that do not fit.

    Those that it does not check itself.

    `graph` is in the order in which it is run.
    """
    writers = _Writers(graph)
    for i, op in enumerate(graph.ops):
        if _base(op) in _RULES:
            try:
                fits = (op.name.endswith(_base(op)) or op.name in _SAME_PARAMETERS) and _RULES[_base(op)][1](
                    _call(writers, i)
                )
            except (
                _UnfitError,
                IndexError,
                TypeError,
                ValueError,
            ):  # too few dimensions, or no number where one belongs
                fits = False
            if not fits:
                shapes = ", ".join(
                    str(list(graph.values[a.value].shape)) for a in (*op.args, *(a for _, a in op.kwargs))
                    if isinstance(a, Ref)
                )  # fmt: skip
                raise GraphError(
                    f"op {i} ({op.name}) takes tensors of shapes {shapes} that do not fit each other, or indices that nothing "
                    "checked. In a bundle: it is damaged or hostile; plan the job again. While a job is recorded: something "
                    "stands between the forward pass and the backward pass, as saved_tensors_hooks does; leave it out, or run "
                    "the program with `port-agent exec`"
                )


def _base(op: Op) -> str:
    return op.name.removeprefix("aten::").partition(".")[0]


def _call(graph: _Writers, index: int) -> _Call:
    op = graph.graph.ops[index]
    base = _base(op)
    names = (_RULES[base][0] if base in _RULES else _FORWARD[base]).split()
    return _Call(graph, index, {**dict(zip(names, op.args, strict=False)), **dict(op.kwargs)})
