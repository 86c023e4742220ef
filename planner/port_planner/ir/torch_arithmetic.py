"""Torch's arithmetic settings, as they are in this thread."""

from typing import Any

import torch

from port_planner.ir.arithmetic import PRODUCTS, Arithmetic

ONEDNN: Any = torch.backends.mkldnn
PRODUCT_SETTINGS = tuple(getattr(ONEDNN, kind) for kind in PRODUCTS)
"""Torch's settings of the precision of each of `PRODUCTS`."""
_DENORMAL = 5e-324


def arithmetic() -> Arithmetic:
    """Return the current settings of this thread."""
    return Arithmetic(
        torch.get_num_threads(),
        ONEDNN.enabled and ONEDNN.is_available(),
        tuple(kind.fp32_precision for kind in PRODUCT_SETTINGS),
        torch.get_deterministic_debug_mode(),
        _DENORMAL * 1.0 == 0.0,  # the register that decides this for torch's kernels decides it for Python's floats
    )
