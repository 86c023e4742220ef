"""Lossless packing of tensors between their uses.

At near memory speed, in a small C library.

Works on addresses of contiguous memory (`tensor.data_ptr()`), does not depend on torch and releases the GIL while it
works. `available()` is False where the library was not built; a plan that packs cannot run there.
"""

from port_agent.packing.codec import (
    CorruptPackingError,
    Layout,
    PackingError,
    PackingOverflowError,
    PackingUnavailableError,
    UnsuitableDataError,
    available,
    largest_bytes,
    multiply,
    pack,
    packed_bytes,
    scatter,
    select,
    unpack,
)
from port_agent.packing.quantized import Quantization
from port_planner.ir.costs import Codec

__all__ = [
    "Codec",
    "CorruptPackingError",
    "Layout",
    "PackingError",
    "PackingOverflowError",
    "PackingUnavailableError",
    "Quantization",
    "UnsuitableDataError",
    "available",
    "largest_bytes",
    "multiply",
    "pack",
    "packed_bytes",
    "scatter",
    "select",
    "unpack",
]
