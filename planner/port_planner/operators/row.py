"""The columns of the operator table: facts that torch's schema and tags do not state, but some room needs."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ArgumentCheck(enum.Enum):
    """A requirement on arguments that an operator does not check itself; the rules are in
    `port_planner.ir.operands`.
    """

    SAME_SHAPES = enum.auto()
    GELU = enum.auto()
    BATCH_NORM = enum.auto()
    CUDNN_BATCH_NORM_BACKWARD = enum.auto()
    LAYER_NORM_BACKWARD = enum.auto()
    WEIGHT_NORM = enum.auto()
    ATTENTION = enum.auto()
    PADDED_ATTENTION = enum.auto()
    ADAPTIVE_AVERAGE = enum.auto()
    AVERAGE_POOL = enum.auto()
    PADDING = enum.auto()
    GRID_SAMPLER = enum.auto()
    MAX_POOL = enum.auto()
    UNFOLD = enum.auto()
    FOURIER = enum.auto()
    UPSAMPLE = enum.auto()
    NLL_LOSS = enum.auto()
    MARGIN_LOSS = enum.auto()
    CTC_LOSS = enum.auto()
    PAIRS = enum.auto()
    DISTANCES_OF_PAIRS = enum.auto()
    DISTANCES = enum.auto()
    EMBEDDING = enum.auto()
    EMBEDDING_BAG = enum.auto()
    EMBEDDING_BAG_BACKWARD = enum.auto()
    LSTM = enum.auto()
    FUSED_UPDATE = enum.auto()
    FAKE_QUANTIZE = enum.auto()


class Reads(enum.Enum):
    """The part of its operands that an operator reads."""

    ALL = enum.auto()
    ROWS = enum.auto()
    """The rows, or the one number, that another argument selects."""
    SHAPES = enum.auto()
    """No contents, only shapes."""


class Result(enum.Enum):
    """How to determine a result's size without the operator's meta kernel, which is Python: it takes 100 us, and
    some load sympy (36 MiB).
    """

    BROADCAST = enum.auto()
    """The operands' broadcast shape, and their data type if all share one."""
    COMPARISON = enum.auto()
    """The operands' broadcast shape, one byte per item."""
    CREATED = enum.auto()
    """The operator's argument `size`, because there is no tensor operand."""
    LIKE = enum.auto()
    """The shape of the first operand, and its data type unless another is requested."""
    ROWS = enum.auto()
    """The shape of the first operand, and its data type if that is float32 and no other is requested."""
    INTO_ZEROS = enum.auto()
    """The second operand: the gradient of a view, zeros with the first operand somewhere in them."""
    NORMALIZED = enum.auto()
    """Like the input, plus mean and deviation, or gradients of weight and bias: one at every
    other layer of a network.
    """


class Filling(enum.Enum):
    """The contents of a new tensor."""

    NOTHING = enum.auto()
    """Whatever the memory contained."""
    ZEROS = enum.auto()
    ONES = enum.auto()
    NUMBER = enum.auto()
    """The argument `fill_number`."""


class Cost(enum.Enum):
    """What determines an operator's time."""

    BYTES = enum.auto()
    """The bytes that it moves."""
    PRODUCT = enum.auto()
    """The multiplications of its `factors`."""
    CONVOLUTION = enum.auto()
    CONVOLUTION_BACKWARD = enum.auto()
    ATTENTION = enum.auto()
    ATTENTION_BACKWARD = enum.auto()


class CutDimension(enum.Enum):
    """How an operator treats the dimension along which it is cut."""

    ELEMENTS = enum.auto()
    """Each element depends only on those at its place; every operand that is as large as the output
    along the dimension is cut.
    """
    ROWS = enum.auto()
    """Each row depends only on its own row; the dimension along which the operator works is the
    argument `axis`, and is not cut.
    """
    FIRST = enum.auto()
    """The operands in `cut` and all outputs are cut; the others stay whole."""
    EVERY = enum.auto()
    """All operands with more than one element are cut in their first dimension, as batches are."""


VECTOR = 64
"""Elements: a multiple of the vectors that exp and the like use, and of every pair of
vectors of 16 bits or more each.
"""
PRODUCT_ROWS = 16
"""Least number of rows of a matrix product; with fewer rows, another kernel is chosen."""


@dataclass(frozen=True, slots=True)
class TileRule:
    """Which parts of an operator may be cut, and how many rows a tile needs to keep its bits."""

    dimension: CutDimension
    least: int = 1
    multiple: int = 1
    """Number of which a tile's elements must be a multiple, because vector code computes the
    last elements differently.
    """
    cut: tuple[int, ...] = ()
    axis: int | None = None
    rounded: bool = False
    """Whether 32 and 64 bit results are correctly rounded, so that vectors and single numbers are equal; `multiple`
    is then for narrower types.
    """


@dataclass(frozen=True, slots=True)
class Product:
    """An operator whose results are sums of products."""

    dims: Mapping[int, str]
    """The arguments that are factors, by their dimensions in Einstein notation, without those
    of a convolution's pixels.
    """
    sums: tuple[tuple[str, int, int], ...]
    """The dimensions that are summed over, and the two arguments that are multiplied."""
    addend: int | None = None
    """The argument that is added to the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Hand-written facts about an operator.

    Arguments are named by position, and overloads as in torch, with "" for the one without a suffix.
    """

    allowed: bool = True
    """Whether a bundle may call it, with any arguments. Other operators occur only in programs under `exec`."""
    cuda_only: bool = False
    """Whether torch uses the operator only on CUDA, instead of the CPU's; elsewhere it has no kernel."""
    check: ArgumentCheck | None = None
    """The check of its arguments before a bundle calls it, because its kernel does not check them."""
    checks_only: bool = False
    """Whether the operator only checks: it has no result, and raises an error if a condition does not hold."""

    hidden_writes: tuple[int, ...] = ()
    """Arguments that it writes although the schema does not say so: running statistics."""
    reads: Reads = Reads.ALL
    shape_only: int | None = None
    """An argument, saved by autograd, of which it uses only the shape."""
    whole_view: bool = False
    """A view of its whole operand that does not ask for the storage."""
    copies: bool = False
    """Whether the operator copies its operand, whose file is hardly read again; loading converts weights this way."""
    indices: tuple[int, int] | None = None
    """The argument, or number, whose size bounds its indices, and the argument with the indices."""
    index_list: bool = False
    """Whether the second argument is a list of indices, masks among them."""
    lengths: int | None = None
    """The position from which its overload `Tensor` takes log-probabilities, labels and both lengths as tensors."""
    pivots: int | None = None
    """Number of the argument whose rows were exchanged, counted from 1."""
    coordinates: int | None = None
    """The argument with coordinates, which it converts to addresses regardless of their values, including NaN."""

    result: Result | None = None
    fill: Filling | None = None
    fill_number: int | None = None
    factors: tuple[int, int] | None = None
    """The two matrices, or batches of matrices, that are multiplied."""
    weight: int | None = None
    """The argument that may be a weight read in blocks: rows of a table, or columns of a product's [inner, columns]."""
    product: Product | None = None
    cost: Cost = Cost.BYTES

    cut: TileRule | None = None
    """Rule by which the operator runs in tiles with the same bits."""
    cut_of_sum: TileRule | None = None
    """Rule by which the operator runs in tiles of `cut` operands, whose results are added.

    Outputs that are shorter along the dimension are such sums.
    """
    sliced: tuple[str, ...] = ()
    """Overloads that compute each element only from those at the same place, and may be part of a sliced update."""
    in_vectors: tuple[str, ...] = ()
    """Further overloads that compute floating-point numbers elementwise, in vectors from the
    start of a thread's share.
    """
    row_operands: int = 0
    """Number of leading operands with independent rows, along the dimension that the next argument gives."""
    in_place: bool = False
    """Whether the operator may write its result over its operand, as its variant with a trailing _ does."""
    commutes: tuple[str, ...] = ()
    """Overloads that may take their two tensors in either order."""
    instead: str = ""
    """The change to a program that avoids an operator that is not allowed, worded as a command."""
    over_lists: bool = False
    """Whether the operator loops over lists of tensors, as do all whose names begin with `_foreach_`, and
    those with a `fused_update`.
    """
    fused_update: bool = False
    """Whether the operator updates lists of tensors in one kernel, as optimizers' `fused=True` does.

    It only reads the steps, though its schema says otherwise.
    """

    repeatable: bool = True
    """Whether the operator gives the same bits for the same operands, unless torch's tags say otherwise."""
    draws_by_shape: tuple[str, ...] = ()
    """Overloads that draw the same number of random numbers for all values of their operands.

    So the generator's position after one is known before it runs.
    """
    casts_inside: bool = False
    """Whether the kernel calls operators that autocast casts.

    Modules call it directly, never below an autocast kernel.
    """
    other_tangents: bool = False
    """Whether the tangent has different last digits under a dispatch mode, found by comparing torch's own
    samples of all functions.
    """
    reordered_on_cuda: str = ""
    """Reference to the documentation that its bits differ from run to run on CUDA."""
    reordered_on_mps: str = ""
