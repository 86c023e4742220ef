"""The masks of secure aggregation: numbers derived from a secret of two devices, or of one.

Flower 1.42 reduces a secret to 32 bits, and a key that two devices share to 28, and seeds a generator with them. A
leader that takes part knows all masks of a sum of three except one. By trying all seeds it finds that one, and so a
device's change. The masks here are the key stream of AES-256 in counter mode, whose key is a hash of the whole secret.
"""

import hashlib
import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

SUMMED_MODULUS = 1 << 32
"""Modulus of masked sums, which is Flower's own; 1,024 devices fit."""
_MARK = b"port-agent: masks of a sum"
_GENERATOR = "pseudo_rand_gen"


def masks(secret: bytes, modulus: int, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """Return uniformly distributed numbers from 0 up to `modulus`, in arrays of these shapes.

    Raises ValueError for another modulus than `SUMMED_MODULUS`.
    """
    if modulus != SUMMED_MODULUS:
        raise ValueError(f"masks are below {SUMMED_MODULUS}, not {modulus}")
    stream = Cipher(algorithms.AES256(hashlib.sha256(_MARK + secret).digest()), modes.CTR(bytes(16))).encryptor()
    drawn = ((shape, stream.update(bytes(4 * math.prod(shape)))) for shape in shapes)
    return [np.frombuffer(data, "<u4").astype(np.int64).reshape(shape) for shape, data in drawn]


def draw_masks_here(flower: ModuleType) -> None:
    """Make a module of Flower draw its masks with `masks`; raises ImportError if it does not draw any."""
    if not hasattr(flower, _GENERATOR):
        raise ImportError(f"{flower.__name__} has no {_GENERATOR}: this version of Flower is not supported")
    setattr(flower, _GENERATOR, masks)
