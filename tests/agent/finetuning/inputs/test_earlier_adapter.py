"""What an adapter's directory says of it, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from port_agent.finetuning.inputs.earlier_adapter import AdapterSettings, adapter_settings
from port_agent.finetuning.inputs.options import FinetuneError

CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["v_proj", "q_proj"],
    "bias": "none",
}


def test_its_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    assert adapter_settings(tmp_path) == AdapterSettings(8, 16.0, False, ("q_proj", "v_proj"))
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, "use_rslora": True}))
    assert adapter_settings(tmp_path).rslora


@pytest.mark.parametrize("changed", [{"peft_type": "IA3"}, {"target_modules": ".*"}])
def test_other_adapters_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(FinetuneError, match="describes adapters that finetune does not train"):
        adapter_settings(tmp_path)


def test_what_is_no_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match="No such file or directory; give the directory of an adapter"):
        adapter_settings(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": "x"}')
    with pytest.raises(FinetuneError, match="does not describe an adapter"):
        adapter_settings(tmp_path)


@pytest.mark.parametrize(
    "changed", [{"alpha_pattern": {"q_proj": 64}}, {"alora_invocation_tokens": [5]}, {"init_lora_weights": "pissa"}]
)
def test_what_would_change_its_result_unseen_is_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(FinetuneError, match=f"asks for {next(iter(changed))} = .* use it with peft"):
        adapter_settings(tmp_path)


def test_what_its_weights_express_is_taken(tmp_path: Path) -> None:
    ours = {**CONFIG, "init_lora_weights": "gaussian", "modules_to_save": ["classifier"], "alpha_pattern": {}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(ours))
    assert adapter_settings(tmp_path).rank == 8
