"""Whether calls give the same bits in blocks as whole, on this machine, kept for the next process.

Comparing one takes as long as the call, twice: minutes for the products of a language model's head on a processor that does not
multiply half precision. Another version of torch, processor, number of threads or setting of its arithmetic has answers of its own.
A damaged file costs a comparison.
"""

import os

import torch

from port_agent.follow.arithmetic import arithmetic
from port_planner.profiling.kept_costs import cache_folder, context, operator_key, read_kept, write_kept

_FOLDER = "comparisons"
_MANNER = "sums that cancel"
"""How is compared: what was found in another manner does not count."""

_LIBRARY_SETTINGS = ("ONEDNN_", "DNNL_", "MKL_", "OPENBLAS_")
"""Beginnings of variables in the environment that choose kernels."""


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
    return operator_key((_MANNER, form, tuple(arithmetic()), settings))


def _name() -> str:
    return context(torch.get_num_threads(), 0, workspace_seen=False)
