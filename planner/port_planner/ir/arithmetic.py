"""The settings of torch's arithmetic, which a program may change while it runs; the same
call then rounds differently.
"""

from collections.abc import Iterator
from typing import NamedTuple

PRODUCTS = ("matmul", "conv", "rnn")
"""Kinds of operators whose float32 factors oneDNN may round."""

FLOAT32_INSTEAD = "compute in float32 where memory allows (dtype=torch.float32; `finetune --compute float32`)"
"""Remedy if the processor multiplies 16-bit numbers in software."""


class Arithmetic(NamedTuple):
    """The settings that select kernels on the CPU, besides operands and processor."""

    threads: int
    onednn: bool
    """Whether oneDNN is in use.

    A product that oneDNN refuses disables it for the rest of the process, which moves float32
    convolutions to other kernels.
    """
    precisions: tuple[str, ...]
    """Precision of each of `PRODUCTS`: "ieee", or the type to which factors are rounded."""
    deterministic: int = 0
    """torch's debug mode: 0 off, 1 warns of operators that are not repeatable, 2 rejects them."""
    flush_denormal: bool = False
    """Whether numbers below the smallest normal one count as zero."""


def differences(one: Arithmetic, other: Arithmetic) -> Iterator[str]:
    """Yield each setting that differs, in words: its name and both values."""
    for name, mine, its in zip(Arithmetic._fields, one, other, strict=True):
        if mine != its:
            yield f"{name} {_shown(mine)} instead of {_shown(its)}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{kind} {precision}" for kind, precision in zip(PRODUCTS, value, strict=True))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
