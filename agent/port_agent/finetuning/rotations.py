"""Rotary positions that depend on the length of a sequence (dynamic NTK, LongRoPE): where padding would change results.

Such a model turns all positions by other angles once a sequence exceeds some length. Padding counts towards it, and so
do longer texts of the same batch. Whether a model does this is tested on its own tables of angles.
"""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.text.sequences import BUCKET_TOKENS
from port_planner.base.tensor_bytes import same_bits


def check_rotations(model: Any, longest: int, *, alone: bool) -> None:
    """Raise FinetuneError if padding, or another text beside, would change what a model reads.

    `longest`: tokens of the longest sequence, padding included; `alone`: whether a batch is one text, padded only to a
    whole number of BUCKET_TOKENS.
    """
    for table in _tables(model):
        if longest <= 2 or same_bits(table(2), table(longest)):
            continue
        steady = _steady(table, longest)
        padding_counts = steady % BUCKET_TOKENS != 0 or not same_bits(table(steady + 1), table(longest))
        if padding_counts or not alone:
            raise FinetuneError(
                f"this {model.config.model_type} turns its positions by other angles in sequences of more than {steady} "
                f"tokens, and padding or texts beside would count; give --seq-len {steady}"
            )


class _Table:
    """The angles of position 1, [width], in a sequence of some length."""

    def __init__(self, module: nn.Module, arguments: dict[str, str]) -> None:
        self._module, self._arguments = module, arguments

    def __call__(self, length: int) -> torch.Tensor:
        module = copy.deepcopy(self._module)  # it keeps the angles of the longest sequence so far
        angles = module(torch.zeros(1), torch.arange(length)[None], **self._arguments)
        first: torch.Tensor = angles[0] if isinstance(angles, tuple) else angles  # cosines, or complex numbers
        return first[0, 1].clone()


def _tables(model: Any) -> Iterator[_Table]:
    """Yield the tables of a model's rotary positions, one for each kind of layer."""
    for name, module in model.named_modules():
        parameters = inspect.signature(module.forward).parameters
        needed = {key for key, one in parameters.items() if one.default is one.empty}
        if not name.endswith("rotary_emb") or not {"position_ids"} <= needed <= {"x", "position_ids", "layer_type"}:
            continue
        if "layer_type" in parameters:
            yield from (_Table(module, {"layer_type": kind}) for kind in sorted({*model.config.layer_types}))
        else:
            yield _Table(module, {})


def _steady(table: _Table, longest: int) -> int:
    """Return the largest length with the angles of short sequences."""
    low, high = 2, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if same_bits(table(2), table(middle)) else (low, middle)
    return low
