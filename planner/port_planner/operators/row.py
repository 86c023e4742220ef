"""The columns of the table of operators: what torch's schema and tags do not say, and some room needs to know."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass


class ArgumentCheck(enum.Enum):
    """What an operator is called with and does not check itself; the rules stand in `port_planner.ir.operands`."""

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


class Reads(enum.Enum):
    """What an operator reads of its operands."""

    ALL = enum.auto()
    ROWS = enum.auto()
    """The rows, or the one number, that another argument names."""
    SHAPES = enum.auto()
    """No byte."""


class Result(enum.Enum):
    """By what the size of a result is known without the operator's meta kernel, which is Python: 100 us, and some load sympy (36 MiB)."""

    BROADCAST = enum.auto()
    """Its operands' broadcast shape, and their data type where all have one."""
    COMPARISON = enum.auto()
    """Their broadcast shape, one byte an item."""
    CREATED = enum.auto()
    """Its argument `size`: there is no tensor operand."""
    LIKE = enum.auto()
    """The shape of the first operand, and its data type where no other is asked for."""
    ROWS = enum.auto()
    """The shape of the first operand, and its data type where that is float32 and no other is asked for."""
    INTO_ZEROS = enum.auto()
    """A size that is the second operand: the gradient of a view, zeros with the first operand somewhere in them."""
    NORMALIZED = enum.auto()
    """Like the input, and mean and deviation, or gradients of weight and bias: a network has one at every other layer."""


class Filling(enum.Enum):
    """What a new tensor is filled with."""

    NOTHING = enum.auto()
    """Whatever was there."""
    ZEROS = enum.auto()
    ONES = enum.auto()
    NUMBER = enum.auto()
    """The argument `fill_number`."""


class Cost(enum.Enum):
    """What an operator's time follows from."""

    BYTES = enum.auto()
    """What it moves."""
    PRODUCT = enum.auto()
    """Multiplications of its `factors`."""
    CONVOLUTION = enum.auto()
    CONVOLUTION_BACKWARD = enum.auto()
    ATTENTION = enum.auto()
    ATTENTION_BACKWARD = enum.auto()


class CutDimension(enum.Enum):
    """How an operator carries a dimension through."""

    ELEMENTS = enum.auto()
    """Each element from those at its place: every operand as large as the output along the dimension is cut."""
    ROWS = enum.auto()
    """Each row from its rows; the dimension that it works along is the argument `axis`, and is not cut."""
    FIRST = enum.auto()
    """The operands `cut` and all outputs are cut, the others whole."""
    EVERY = enum.auto()
    """All operands with more than one element are cut in their first dimension, as batches are."""


VECTOR = 64
"""Elements: a multiple of every vector that exp and its like are computed in, and of every pair of vectors of 16 bits or more each."""
PRODUCT_ROWS = 16
"""Of a matrix product: fewer rows choose another kernel."""


@dataclass(frozen=True, slots=True)
class TileRule:
    """What may be cut of an operator, and the least number of rows of a piece that keeps its bits."""

    dimension: CutDimension
    least: int = 1
    multiple: int = 1
    """Elements of a piece must be a multiple of this: vector code computes the last elements another way."""
    cut: tuple[int, ...] = ()
    axis: int | None = None
    rounded: bool = False
    """Results in 32 and 64 bits are rounded correctly, so are the same in vectors and one by one: `multiple` is of narrower types."""


@dataclass(frozen=True, slots=True)
class Product:
    """An operator whose results are sums of products."""

    dims: Mapping[int, str]
    """Arguments that are factors, by their dimensions as in Einstein's notation; further ones, of a convolution's pixels, are left out."""
    sums: tuple[tuple[str, int, int], ...]
    """Dimensions that are summed over, and the two arguments whose products are."""
    addend: int | None = None
    """The argument that is added to the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What is known of an operator by hand. Arguments are named by position; overloads as torch does, "" for the one without a suffix."""

    allowed: bool = True
    """A bundle may call it, with any arguments. Others are met only where a user's program is followed."""
    cuda_only: bool = False
    """torch takes it for a model on CUDA in place of the CPU's; elsewhere it has no kernel."""
    check: ArgumentCheck | None = None
    """What is checked of its arguments before a bundle's call of it, because its kernel does not."""
    checks_only: bool = False
    """It makes nothing, and raises where something is not as it must be."""

    hidden_writes: tuple[int, ...] = ()
    """Arguments that are written although the schema says nothing: running statistics."""
    reads: Reads = Reads.ALL
    shape_only: int | None = None
    """An argument, saved by autograd, of which it looks at the shape alone."""
    whole_view: bool = False
    """A view of all that its operand is of: it does not ask for the storage."""
    copies: bool = False
    """It makes a copy of its operand, whose file is hardly read again: weights are converted so when they are loaded."""
    indices: tuple[int, int] | None = None
    """The argument whose size bounds its indices, or the number that does, and the argument that holds them."""
    index_list: bool = False
    """Its second argument is a list of indices, masks among them."""
    lengths: int | None = None
    """From which argument on its overload `Tensor` takes log-probabilities, labels and both lengths as tensors."""
    pivots: int | None = None
    """The argument that holds rows which were exchanged, counted from one."""
    coordinates: int | None = None
    """The argument that holds coordinates, which it turns into addresses whatever they are, NaN included."""

    result: Result | None = None
    fill: Filling | None = None
    fill_number: int | None = None
    factors: tuple[int, int] | None = None
    """The two matrices, or batches of them, that are multiplied."""
    weight: int | None = None
    """The argument that may be a weight read in blocks: of rows of a table, or of columns of a product's [inner, columns]."""
    product: Product | None = None
    cost: Cost = Cost.BYTES

    cut: TileRule | None = None
    """How it runs in pieces with the same bits."""
    cut_of_sum: TileRule | None = None
    """How it runs in pieces, `cut` operands each, whose results are added up: outputs that are not as long along the dimension are such sums."""
    sliced: tuple[str, ...] = ()
    """Overloads that compute each element from the elements at the same place only, and may stand in an update that runs slice by slice."""
    in_vectors: tuple[str, ...] = ()
    """Further overloads that compute floating-point numbers elementwise, in vectors from where a thread's share begins."""
    row_operands: int = 0
    """So many first operands have rows, along the dimension that the argument behind them names, which are computed each by itself."""
    in_place: bool = False
    """It may write its result where its operand lies: its name with a _ does."""
    commutes: tuple[str, ...] = ()
    """Overloads that may take their two tensors in either order."""
    over_lists: bool = False
    """It is a loop over lists of tensors, as all are whose names begin with `_foreach_`, and those with a `fused_update`."""
    fused_update: bool = False
    """It updates lists of tensors in one kernel, as optimizers' `fused=True` does. Steps are only read, though its schema says otherwise."""

    repeatable: bool = True
    """It gives the same bits again from the same operands, as far as torch's tags do not deny it."""
    draws_by_shape: tuple[str, ...] = ()
    """Overloads that draw as many random numbers whatever their operands hold: how far the generator is after one is known before it runs."""
    casts_inside: bool = False
    """Its kernel calls operators that autocast casts. Modules call it directly, never from below an autocast kernel."""
    other_tangents: bool = False
    """Its tangent has other last digits under a dispatch mode. Found by comparing those of torch's own samples of all functions."""
    reordered_on_cuda: str = ""
    """The source of knowing that it does not give the same bits each time on CUDA."""
    reordered_on_mps: str = ""
