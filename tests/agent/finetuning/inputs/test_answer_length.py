"""The length of answers follows from the model's sizes and the budget, within bounds."""

import json
from pathlib import Path
from typing import Any

import pytest

from port_agent.finetuning.inputs.answer_length import longest_answer

MIB = 1 << 20
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
GPT2 = {"n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}


@pytest.mark.parametrize(
    ("config", "ram", "with_head", "expected"),
    [
        (SMOL, 600 * MIB, False, 1472),
        (SMOL, 300 * MIB, False, 736),
        (SMOL, 600 * MIB, True, 288),
        (SMOL, 100 * MIB, False, 256),
        (SMOL, 8192 * MIB, False, 2048),
        ({"text_config": SMOL}, 600 * MIB, False, 1472),
        ({**SMOL, "max_position_embeddings": 512}, 600 * MIB, False, 512),
        ({**SMOL, "max_position_embeddings": 128}, 600 * MIB, False, 256),
        (GPT2, 8192 * MIB, False, 1024),
        ({**SMOL, "text_config": None}, 600 * MIB, False, 1472),
        ({**SMOL, "vocab_size": None, "text_config": {}}, 600 * MIB, True, 1472),
        ({"model_type": "other"}, 8192 * MIB, False, 256),
    ],
)
def test_it_follows_from_sizes_and_budget(
    config: dict[str, Any], ram: int, with_head: bool, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert longest_answer(tmp_path, ram, with_head=with_head) == expected
