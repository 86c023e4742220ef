"""Results of comparisons on this machine, stored for later processes.

Comparing a call takes as long as the call, twice: minutes for the products of a language model's head on a processor
that does not multiply half precision. Each version of torch, processor, number of threads and arithmetic setting has
its own results. A damaged file only costs a new comparison.
"""

import os
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from port_planner.base.cache import cache_folder, read_cached, write_cached
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic
from port_planner.ir.torch_arithmetic import arithmetic
from port_planner.profiling.kept_costs import MAX_FILES, context, operator_key

_METHOD = "sums that cancel"
"""Number of the method of comparison; results from another method do not count."""

_LIBRARY_SETTINGS = (
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OPENBLAS_",
    "ATEN_CPU_CAPABILITY",
    "TORCH_MKLDNN_",
    "ARM_COMPUTE_",
    "NVPL_",
)
"""Prefixes of the environment variables that affect the choice of kernels."""

_Answer = TypeVar("_Answer")


def answer_key(*form: object) -> str:
    """Return the key of a form under the settings of the computing libraries; each of its parts must
    have a `repr` of its own.
    """
    settings = sorted(pair for pair in os.environ.items() if pair[0].startswith(_LIBRARY_SETTINGS))
    return operator_key((_METHOD, *form, settings))


class AnswerFile(Generic[_Answer]):
    """The results of one kind for a number of threads, by `answer_key`, in one file of the user's cache."""

    def __init__(self, folder: str, kind: type[_Answer], threads: int) -> None:
        self._folder, self._name = cache_folder(folder), context(threads, 0, workspace_seen=False)
        self._content = dict[str, kind]  # type: ignore[valid-type]

    def read(self) -> dict[str, _Answer]:
        """Return the stored results; none if the file cannot be read."""
        return read_cached(self._folder, self._name, self._content) or {}

    def add(self, fresh: Mapping[str, _Answer]) -> None:
        """Store these results, too."""
        write_cached(self._folder, self._name, {**self.read(), **fresh}, max_files=MAX_FILES)


class KeptAnswers:
    """Whether calls have the bits of the whole in tiles, by form: operator, shapes, layouts, data types and everything
    else that may select a kernel.
    """

    def __init__(self) -> None:
        self._known: dict[object, bool | None] = {}
        """Results by form and the arithmetic at the time; None if it was never compared."""

    def get(self, form: object) -> bool | None:
        """Return whether a call of this form was found equal; None if it was never compared."""
        key = form, arithmetic()
        if key not in self._known:
            self._known[key] = _file().read().get(_key(form))
        return self._known[key]

    def equal(self, form: object, compare: Callable[[], bool]) -> bool:
        """Return whether a call of this form is equal; calls `compare`, whose errors propagate, if it was never
        compared.
        """
        known = self.get(form)
        if known is None:
            with unchanged_arithmetic():
                known = compare()
            self._known[form, arithmetic()] = known
            _file().add({_key(form): known})
        return known


def _file() -> AnswerFile[bool]:
    return AnswerFile("comparisons", bool, torch.get_num_threads())


def _key(form: object) -> str:
    return answer_key(form, tuple(arithmetic()))
