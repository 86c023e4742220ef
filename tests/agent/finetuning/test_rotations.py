"""Whether a model's positions depend on the length of a sequence is seen by its own angles."""

from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from port_agent.finetuning.inputs.options import FinetuneError
from port_agent.finetuning.rotations import check_rotations

SHAPE: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "pad_token_id": 0,
}  # fmt: skip
SHARES = [1.0, 1.5] * 4


def llama(**rope: Any) -> Any:
    config = LlamaConfig(**SHAPE, max_position_embeddings=48, rope_parameters={"rope_theta": 1e4, **rope})
    return AutoModelForCausalLM.from_config(config)


def test_angles_that_are_the_same_at_all_lengths_are_taken() -> None:
    for rope in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}):
        check_rotations(llama(**rope), 128, alone=False)


def test_angles_that_grow_with_the_length_are_refused_beyond_it() -> None:
    model = llama(rope_type="dynamic", factor=2.0)
    check_rotations(model, 48, alone=False)
    with pytest.raises(FinetuneError, match=r"more than 48 tokens, and padding .* would count; give --seq-len 48"):
        check_rotations(model, 64, alone=True)
    check_rotations(model, 48, alone=False)  # asking has left no longer table behind


def test_angles_of_long_texts_are_those_of_a_text_that_stands_alone() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": SHARES}
    model = AutoModelForCausalLM.from_config(
        Phi3Config(**SHAPE, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope)
    )
    check_rotations(model, 64, alone=True)
    check_rotations(model, 32, alone=False)
    with pytest.raises(FinetuneError, match="more than 32 tokens"):
        check_rotations(model, 64, alone=False)
