"""The settings of torch's arithmetic, which a program may change on its way: the same call then rounds otherwise."""

from collections.abc import Iterator
from typing import NamedTuple

PRODUCTS = ("matmul", "conv", "rnn")
"""Kinds of operators whose float32 factors oneDNN may round."""

FLOAT32_INSTEAD = "compute in float32 where memory allows (dtype=torch.float32; `finetune --compute float32`)"
"""Remedy where the processor multiplies 16-bit numbers in software."""


class Arithmetic(NamedTuple):
    """The settings that select kernels on the CPU, besides operands and processor."""

    threads: int
    onednn: bool
    """A product that oneDNN refuses switches it off for the rest of the process, which moves float32 convolutions to other kernels."""
    precisions: tuple[str, ...]
    """Precision of each of `PRODUCTS`: "ieee", or what factors are rounded to."""
    deterministic: int = 0
    """torch's debug mode: 0 off, 1 warns of operators that do not repeat, 2 refuses them."""
    flush_denormal: bool = False
    """Whether numbers below the smallest normal one count as zero."""


def differences(one: Arithmetic, other: Arithmetic) -> Iterator[str]:
    """Yield each setting that differs between the two, in words: its name and both values."""
    for name, mine, its in zip(Arithmetic._fields, one, other, strict=True):
        if mine != its:
            yield f"{name} {_shown(mine)} instead of {_shown(its)}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{kind} {precision}" for kind, precision in zip(PRODUCTS, value, strict=True))
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
