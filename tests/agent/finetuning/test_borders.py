"""Whether a model keeps texts of one sequence apart is seen by what it makes of them."""

import pytest

from port_agent.finetuning.borders import check_borders
from port_agent.finetuning.inputs.options import FinetuneError
from tests.agent.finetuning.accumulation.small_models import model_of

TEXT = range(2, 12)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "gemma2"])
def test_attention_keeps_them(kind: str) -> None:
    model = model_of(kind, adapted=False)
    check_borders(model, TEXT)
    assert model.training


@pytest.mark.parametrize("kind", ["mamba", "opt"])
def test_what_carries_a_state_or_is_told_no_places_does_not(kind: str) -> None:
    with pytest.raises(FinetuneError, match=f"this {kind} carries state across the border"):
        check_borders(model_of(kind, adapted=False), TEXT)
