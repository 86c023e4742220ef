"""What the doctor asks of torch."""

import json

import pytest
import torch

from port_agent.health import torch_report


@pytest.mark.parametrize("software", [True, False])
def test_one_object_has_the_parts_and_what_bfloat16_costs(
    software: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_report, "in_software", lambda dtype: software)
    monkeypatch.setattr(torch_report, "cost_of_software", lambda dtype: f"{dtype} costs")
    torch_report.main()
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == torch.__version__ and found["missing"] == []
    assert found["bfloat16"] == ("torch.bfloat16 costs" if software else None)
