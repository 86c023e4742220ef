"""Which way micro-batches run, and that the reason is said."""

from dataclasses import replace
from typing import Any

import pytest

from port_agent.finetuning.accumulation.choice import accumulation_of
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions, MicroBatchOrder
from port_agent.finetuning.text.task import Task, TaskKind
from tests.agent.finetuning.accumulation.small_models import model_of

MIB = 1 << 20
OPTIONS = FinetuneOptions("/m", ("/d",), "/out", accumulate=8)
CAUSAL = Task(TaskKind.CAUSAL_LM)


@pytest.fixture(scope="module")
def llama() -> Any:
    return model_of("llama", adapted=False)


def test_weights_that_do_not_fit_are_read_once_for_all(llama: Any) -> None:
    chosen = accumulation_of(llama, OPTIONS, CAUSAL, 500 * MIB, 100 * MIB)
    assert chosen.by_layers
    assert "500.0 MiB do not fit into 100.0 MiB" in chosen.why and "each layer is computed once more" in chosen.why


def test_what_fits_or_has_one_batch_runs_one_by_one(llama: Any) -> None:
    for options, room, why in (
        (OPTIONS, 500 * MIB, "fit into the budget"),
        (OPTIONS, None, "there is no budget"),
        (replace(OPTIONS, accumulate=1), 1, "an update has one batch"),
        (replace(OPTIONS, accumulate_by=MicroBatchOrder.BATCHES), 1, "as asked for"),
    ):
        chosen = accumulation_of(llama, options, CAUSAL, 500 * MIB, room)
        assert not chosen.by_layers and why in chosen.why
    for count in (1, 8):
        asked = replace(OPTIONS, accumulate=count, accumulate_by=MicroBatchOrder.LAYERS)
        assert accumulation_of(llama, asked, CAUSAL, 1, None).by_layers


def test_what_cannot_run_by_layers_runs_one_by_one_and_is_refused_where_it_was_asked_for(llama: Any) -> None:
    dropping = model_of("llama", adapted=False, attention_dropout=0.1)
    for model, task, why in ((dropping, CAUSAL, "dropout"), (llama, Task(TaskKind.MASKED_LM), "encoder")):
        chosen = accumulation_of(model, OPTIONS, task, 500 * MIB, 1)
        assert not chosen.by_layers and why in chosen.why
        with pytest.raises(FinetuneError, match=f"{why}.*leave out --accumulate-by"):
            accumulation_of(model, replace(OPTIONS, accumulate_by=MicroBatchOrder.LAYERS), task, 1, 1)


def test_adapters_that_write_to_flash_go_layer_by_layer(llama: Any) -> None:
    one = replace(OPTIONS, accumulate=1)
    chosen = accumulation_of(llama, one, CAUSAL, 1, 500 * MIB, 260 * MIB)
    assert chosen.by_layers and "260.0 MiB to flash" in chosen.why
    for options, flash in (
        (one, MIB),
        (replace(one, lora_rank=None), 260 * MIB),
        (replace(one, accumulate_by=MicroBatchOrder.BATCHES), 260 * MIB),
    ):
        assert not accumulation_of(llama, options, CAUSAL, 1, 500 * MIB, flash).by_layers
