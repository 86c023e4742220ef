"""Codes are decoded to the numbers that they stand for, to the bit, or refused by name."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from port_agent.finetuning.decoding.codes import coded_weights
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.decoding.coded_models import GROUP, Packed, awq_layer, gptq_layer, nf4_layer

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

LAYERS: dict[str, tuple[Callable[[], Packed], dict[str, Any]]] = {
    **{f"gptq {bits}": (functools.partial(gptq_layer, 192, 64, bits), {**GPTQ, "bits": bits}) for bits in (2, 4, 8)},
    "gptq_v2": (functools.partial(gptq_layer, 192, 64, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq by activations": (functools.partial(gptq_layer, 192, 64, in_order=False), GPTQ),
    "awq": (functools.partial(awq_layer, 192, 64), AWQ),
    "nf4": (functools.partial(nf4_layer, 192, 64), NF4),
    "nf4 of scales in codes": (functools.partial(nf4_layer, 192, 64, nested=True), NF4),
    "nf4 of rows of no whole blocks": (functools.partial(nf4_layer, 192, 96), NF4),
}


def stored(made: dict[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    return {f"a{end}": functools.partial(lambda tensor: tensor, tensor) for end, tensor in made.items()}


@pytest.mark.parametrize("name", LAYERS)
def test_numbers_are_those_that_codes_stand_for(name: str) -> None:
    torch.manual_seed(7)
    layer, config = LAYERS[name]
    made, wanted = layer()
    weights, used = coded_weights(config, stored(made))
    assert used == {f"a{end}" for end in made} and list(weights) == ["a.weight"]
    found = weights["a.weight"]
    assert found.is_coded and found.shape == wanted.shape
    assert torch.equal(found.rows(0, 192), wanted) and torch.equal(found.rows(64, 128), wanted[64:128])


def test_groups_without_an_index_are_neighbours_also_if_the_last_is_shorter() -> None:
    torch.manual_seed(7)
    made, wanted = gptq_layer(64, 48)
    del made[".g_idx"]
    assert torch.equal(coded_weights(GPTQ, stored(made))[0]["a.weight"].rows(0, 64), wanted)
    both = {end: tensor[: 5 if end == ".qweight" else 3] for end, tensor in made.items()}
    weight = coded_weights(GPTQ, stored(both))[0]["a.weight"]
    assert weight.shape == (64, 40) and torch.equal(weight.rows(0, 64), wanted[:, :40])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            "quantized by bitsandbytes in 8 bits, and decode reads",
        ),
        ({**GPTQ, "bits": 3}, "quantized by GPTQ in 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "quantized by GPTQ as marlin"),
        ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "GPTQ with other settings for some layers"),
        ({**AWQ, "version": "gemv"}, "quantized by AWQ of version gemv"),
        ({**AWQ, "zero_point": False}, "quantized by AWQ without zero points"),
        ({"quant_method": "fp8"}, "quantized by 'fp8', and decode reads"),
        ({**GPTQ, "bits": "four"}, "quantization_config is not valid"),
    ],
)
def test_others_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FinetuneError, match=said):
        coded_weights(config, {})


def test_a_zero_that_programs_read_in_two_ways_is_refused() -> None:
    made, _ = gptq_layer(64, 32)
    made[".qzeros"][0, 0] |= 15
    with pytest.raises(FinetuneError, match=r"a\.qzeros stores the largest code as a zero"):
        coded_weights(GPTQ, stored(made))


def _state(shape: list[int]) -> torch.Tensor:
    return torch.tensor(list(json.dumps({"blocksize": 64, "shape": shape}).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "end", "changed"),
    [
        ("gptq 4", ".scales", None),
        ("gptq 4", ".qzeros", torch.zeros(4, 23, dtype=torch.int32)),
        ("gptq 4", ".g_idx", torch.full((64,), 4)),
        ("awq", ".qzeros", torch.zeros(4, 24, dtype=torch.int64)),
        ("nf4", ".weight.absmax", None),
        ("nf4", ".weight.absmax", torch.rand(191)),
        ("nf4", ".weight.quant_state.bitsandbytes__nf4", _state([192, 65])),
        ("nf4", ".weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8)),
        ("nf4 of scales in codes", ".weight.nested_absmax", torch.rand(3)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, end: str, changed: torch.Tensor | None) -> None:
    layer, config = LAYERS[name]
    made, _ = layer()
    made = {key: tensor for key, tensor in made.items() if key != end} | ({} if changed is None else {end: changed})
    with pytest.raises(FinetuneError, match=r"does not fit the tensors beside it|does not describe a quantized matrix"):
        coded_weights(config, stored(made))
