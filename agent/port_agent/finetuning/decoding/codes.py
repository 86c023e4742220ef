"""Weights that bitsandbytes, GPTQ and AWQ store as codes in safetensors files, decoded to
their exact values in 32 bits.

A value of GPTQ or AWQ is a difference of two small integers times a 16-bit scale, which 32 bits hold exactly. One of
bitsandbytes is a level times a 32-bit scale, rounded to 32 bits once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import torch

from port_agent.finetuning.decoding.weight import DecodedWeight
from port_agent.finetuning.inputs.options import FinetuneError
from port_planner.base.units import shown

Tensors: TypeAlias = Mapping[str, Callable[[], torch.Tensor]]
"""Functions that read the tensors of a model directory, by name."""

_WORD_BITS = 32
_GPTQ_BITS = (2, 4, 8)
_AWQ_BITS = 4
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit positions of the codes of eight neighbouring columns in a word of AWQ."""

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_QWEIGHT, _QZEROS, _SCALES, _GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"


class _Settings(msgspec.Struct):
    """The quantization_config of a model."""

    quant_method: str = "gptq"
    bits: int | None = None
    group_size: int = 0
    checkpoint_format: str = "gptq"
    version: str = "gemm"
    zero_point: bool = True
    dynamic: object = None
    load_in_8bit: bool = False


class _BlockState(msgspec.Struct):
    """The quantization of a bitsandbytes weight; the `nested` fields describe that of its scales."""

    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def coded_weights(config: Mapping[str, Any], tensors: Tensors) -> tuple[dict[str, DecodedWeight], set[str]]:
    """Return by name the weights that are stored in codes, and the names of the tensors from which they are decoded.

    `config`: the model's quantization_config. Raises FinetuneError for a quantization that is not decoded exactly.
    """
    try:
        settings = msgspec.convert(config, _Settings)
    except msgspec.ValidationError as error:
        raise FinetuneError(f"quantization_config is not valid ({error}); download the model again") from error
    odd = _odd_setting(settings)
    if odd is not None:
        raise FinetuneError(
            f"the weights are quantized by {odd}, and decode reads bitsandbytes in 4 bits, GPTQ in 2, 4 and 8 bits, "
            "and AWQ of version gemm; use the original model in floating point"
        )
    if settings.quant_method == "bitsandbytes":
        return _bitsandbytes_weights(tensors)
    return _grouped_weights(settings, tensors)


def _odd_setting(settings: _Settings) -> str | None:
    match settings.quant_method:
        case "bitsandbytes":
            return "bitsandbytes in 8 bits" if settings.load_in_8bit else None
        case "gptq":
            odd = (
                (settings.bits not in _GPTQ_BITS, f"GPTQ in {settings.bits} bits"),
                (settings.checkpoint_format not in ("gptq", "gptq_v2"), f"GPTQ as {settings.checkpoint_format}"),
                (bool(settings.dynamic), "GPTQ with other settings for some layers (dynamic)"),
            )
        case "awq":
            odd = (
                (settings.bits != _AWQ_BITS, f"AWQ in {settings.bits} bits"),
                (settings.version.lower() != "gemm", f"AWQ of version {settings.version}"),
                (not settings.zero_point, "AWQ without zero points"),
            )
        case other:
            return shown(other)
    return next((what for is_odd, what in odd if is_odd), None)


# -- bitsandbytes


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Codes of 4 bits, the first of two in a byte in its high half, their levels, and the scales of blocks of them."""

    codes: torch.Tensor
    levels: torch.Tensor
    scales: torch.Tensor
    block: int
    columns: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return decoded rows. `start` is even."""
        begin, end = start * self.columns, stop * self.columns
        pairs = self.codes[begin // 2 : -(-end // 2)]
        codes = torch.stack((pairs >> 4, pairs & 15), 1).view(-1)[: end - begin]
        scales = self.scales[torch.arange(begin, end) // self.block]
        return (self.levels[codes.long()] * scales).view(-1, self.columns)


def _bitsandbytes_weights(tensors: Tensors) -> tuple[dict[str, DecodedWeight], set[str]]:
    weights, used = {}, set()
    for named in tensors:
        name = next((named.removesuffix(end) for end in _STATES if named.endswith(end)), None)
        if name is None:
            continue
        state = _decoded_state(named, tensors)
        parts = {n for n in tensors if n == name or n.startswith(f"{name}.")}
        missing = {name, f"{name}.absmax", f"{name}.quant_map"} - parts
        if missing:
            raise _damaged(min(missing))
        rows, columns = state.shape
        codes = tensors[name]().view(-1)
        blocks = _Blocks(
            codes, tensors[f"{name}.quant_map"](), _block_scales(name, state, tensors), state.blocksize, columns
        )
        if codes.dtype is not torch.uint8 or len(codes) != -(-rows * columns // 2):
            raise _damaged(name)
        if len(blocks.scales) != -(-rows * columns // state.blocksize) or len(blocks.levels) != 1 << 4:
            raise _damaged(name)
        weights[name] = DecodedWeight((rows, columns), blocks.rows, is_coded=True)
        used |= parts
    return weights, used


def _decoded_state(named: str, tensors: Tensors) -> _BlockState:
    try:
        return msgspec.json.decode(tensors[named]().numpy().tobytes(), type=_BlockState)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FinetuneError(f"{named} does not describe a quantized matrix ({error}); download it again") from error


def _block_scales(name: str, state: _BlockState, tensors: Tensors) -> torch.Tensor:
    """Return the scales of a weight's blocks, decoded if they are themselves codes of 8 bits."""
    scales = tensors[f"{name}.absmax"]()
    if state.nested_blocksize is None:
        return scales.float()
    try:
        levels, outer = tensors[f"{name}.nested_quant_map"](), tensors[f"{name}.nested_absmax"]()
        blocks = torch.arange(len(scales)) // state.nested_blocksize
        return levels[scales.long()] * outer[blocks] + state.nested_offset
    except (KeyError, IndexError) as error:
        raise _damaged(f"{name}.absmax") from error


# -- GPTQ and AWQ


@dataclass(frozen=True, slots=True)
class _Groups:
    """Codes of a weight, and the zeros and scales of groups of its inputs. `groups`: the group of each input.

    `codes`: 32-bit words, [inputs / codes in a word, outputs], or of AWQ [inputs, outputs / codes in a word]; `zeros`:
    [groups, outputs / codes in a word]; `scales`: [groups, outputs]; `shifts`: where a word has its codes.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor
    shifts: tuple[int, ...]
    bits: int
    along_outputs: bool
    zero_offset: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return the decoded weights of some outputs. `start` is a multiple of the codes in a word."""
        words = slice(start // len(self.shifts), stop // len(self.shifts))
        zeros = self._unpacked(self.zeros[:, words], along_columns=True) + self.zero_offset
        part = self.codes[:, words if self.along_outputs else slice(start, stop)]
        codes = self._unpacked(part, along_columns=self.along_outputs)
        scales = self.scales[:, start:stop].float()
        return ((codes - zeros[self.groups]).float() * scales[self.groups]).T.contiguous()

    def _unpacked(self, words: torch.Tensor, *, along_columns: bool) -> torch.Tensor:
        shifts = torch.tensor(self.shifts, dtype=torch.int32)
        mask = (1 << self.bits) - 1
        if along_columns:
            return (words.unsqueeze(2) >> shifts & mask).flatten(1)
        return (words.unsqueeze(1) >> shifts[:, None] & mask).flatten(0, 1)

    def has_ambiguous_zero(self) -> bool:
        """Return whether a stored zero is the largest code, which programs read as 0 or as one more than that."""
        largest = (1 << self.bits) - 1
        return bool(self.zero_offset and (self._unpacked(self.zeros, along_columns=True) == largest).any())


def _grouped_weights(settings: _Settings, tensors: Tensors) -> tuple[dict[str, DecodedWeight], set[str]]:
    weights, used = {}, set()
    for named in tensors:
        if not named.endswith(_QWEIGHT):
            continue
        module = named.removesuffix(_QWEIGHT)
        parts = {f"{module}{end}" for end in (_QWEIGHT, _QZEROS, _SCALES)}
        if parts - tensors.keys():
            raise _damaged(min(parts - tensors.keys()))
        found = _groups_of(module, settings, tensors)
        if found.has_ambiguous_zero():
            raise FinetuneError(
                f"{module}{_QZEROS} stores the largest code as a zero, which programs read in two ways; save the model "
                "in the format gptq_v2"
            )
        outputs, inputs = found.scales.shape[1], len(found.groups)
        weights[f"{module}.weight"] = DecodedWeight((outputs, inputs), found.rows, is_coded=True)
        used |= parts | ({f"{module}{_GROUPS}"} & tensors.keys())
    return weights, used


def _groups_of(module: str, settings: _Settings, tensors: Tensors) -> _Groups:
    """Return the codes of a layer. Raises FinetuneError if its tensors do not fit each other."""
    codes, zeros, scales = (tensors[f"{module}{end}"]() for end in (_QWEIGHT, _QZEROS, _SCALES))
    is_awq = settings.quant_method == "awq"
    bits = settings.bits or _AWQ_BITS
    shifts = _AWQ_SHIFTS if is_awq else tuple(range(0, _WORD_BITS, bits))
    inputs = codes.shape[0] * (1 if is_awq else len(shifts))
    outputs = codes.shape[1] * (len(shifts) if is_awq else 1)
    words = torch.int32
    fits = (
        codes.dtype == zeros.dtype == words
        and scales.is_floating_point()
        and scales.shape[1] == zeros.shape[1] * len(shifts) == outputs
        and len(scales) == len(zeros)
    )
    given = tensors.get(f"{module}{_GROUPS}")
    size = settings.group_size if settings.group_size > 0 else inputs
    groups = torch.arange(inputs) // size if given is None else given().long()
    if not fits or len(groups) != inputs or not 0 <= int(groups.min()) <= int(groups.max()) == len(scales) - 1:
        raise _damaged(f"{module}{_QWEIGHT}")
    offset = 1 if not is_awq and settings.checkpoint_format == "gptq" else 0
    return _Groups(codes, zeros, scales, groups, shifts, bits, is_awq, offset)


def _damaged(name: str) -> FinetuneError:
    return FinetuneError(f"{name} is missing or does not fit the tensors beside it; download the model again")
