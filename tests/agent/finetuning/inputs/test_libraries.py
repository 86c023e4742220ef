"""What shards tensors among processes is not loaded for one that trains alone, and nothing else notices."""

from pathlib import Path

import pytest

from tests.agent.intercept.programs import followed

pytestmark = pytest.mark.process

_SAID = """
import sys, torch
import port_agent.finetuning.training
from transformers.models.qwen2 import modeling_qwen2
print(torch.distributed.is_available(), "torch.distributed.tensor" in sys.modules, "torch.distributed.fsdp" in sys.modules)
"""


def test_what_shards_tensors_stays_away(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SAID)
    assert followed("train.py", folder=tmp_path).output.split() == ["True", "False", "False"]
