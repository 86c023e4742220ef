"""Whether calls give the same bits in blocks as whole, on this machine, kept for the next process.

Comparing one takes as long as the call, twice: minutes for the products of a language model's head on a processor that does not
multiply half precision. Another version of torch, processor, number of threads or setting of its arithmetic has answers of its own.
A damaged file costs a comparison.
"""

import os

import torch

from agent.follow.arithmetic import arithmetic
from planner.profiling.kept_costs import cache_folder, context, operator_key, read_kept, write_kept

_FOLDER = "comparisons"
_LIBRARY_SETTINGS = ("ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_")
"""Beginnings of variables in the environment that choose kernels."""


def mirrored(numbers: torch.Tensor, dim: int, sign: int) -> torch.Tensor:
    """Make the second half of made-up numbers along a dimension `sign` times the first, from its end to its beginning, and return them.

    Two halves that are added up for themselves are in different orders so, and do not cancel without a trace. A sum over that dimension of products with an operand mirrored by the other sign is what rounding left of it. In half precision the order of
    adding shows in one of 64,000 sums of other numbers, in one of three of these (measured, matrix units of an Intel Xeon).
    """
    half = numbers.shape[dim] // 2
    numbers.narrow(dim, half, half).copy_(sign * numbers.narrow(dim, 0, half).flip(dim))
    return numbers


class KeptComparisons:
    """Answers by form: a call's operator, shapes, layouts, data types and whatever else may choose its kernel, with a `repr` of its own."""

    def __init__(self) -> None:
        self._found: dict[object, bool | None] = {}
        """By form and the arithmetic of the time; None: never compared."""

    def get(self, form: object) -> bool | None:
        """Return whether a call of this form was found equal; None where none was compared."""
        key = form, arithmetic()
        if key not in self._found:
            self._found[key] = _read().get(_kept_key(form))
        return self._found[key]

    def note(self, form: object, *, equal: bool) -> None:
        """Keep what a comparison found."""
        self._found[form, arithmetic()] = equal
        write_kept(cache_folder(_FOLDER), _name(), {**_read(), _kept_key(form): equal})


def _read() -> dict[str, bool]:
    """Return the answers that are kept, by `_kept_key`."""
    return read_kept(cache_folder(_FOLDER), _name(), dict[str, bool]) or {}


def _kept_key(form: object) -> str:
    """Return the key of a form under the present arithmetic and the settings of the libraries that compute."""
    settings = sorted(pair for pair in os.environ.items() if pair[0].startswith(_LIBRARY_SETTINGS))
    return operator_key((form, tuple(arithmetic()), settings))


def _name() -> str:
    return context(torch.get_num_threads(), 0, workspace_seen=False)
