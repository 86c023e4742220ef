"""What a step computes in: as asked for, as the checkpoint has it, or as was measured."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from port_agent.finetuning import compute
from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.checkpoint import Checkpoint, FinetuneProgress
from port_agent.finetuning.compute import choose_compute
from port_agent.finetuning.inputs.options import Compute, FinetuneError, FinetuneOptions
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.packing import Quantization
from tests.agent.finetuning.tiny_model import make_model

CAUSAL = Task(TaskKind.CAUSAL_LM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> FinetuneOptions:
    return FinetuneOptions(str(folder), ("data",), str(tmp_path / "out"))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A processor that multiplies bfloat16 in software."""
    monkeypatch.setattr(compute, "in_software", lambda dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(compute, "slowdown", lambda dtype, shape: 9.6)
    yield


def chosen(options: FinetuneOptions) -> tuple[Compute | None, str]:
    found, why = choose_compute(options, CAUSAL)
    assert replace(found, compute=options.compute) == options
    return found.compute, why


def test_a_processor_with_instructions_for_it_computes_as_is_stored(
    asked: FinetuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "in_software", lambda dtype: False)
    assert chosen(asked) == (Compute.STORED, "")
    assert chosen(replace(asked, compute=Compute.FLOAT32)) == (Compute.FLOAT32, "as asked for")


def test_one_without_computes_in_float32_where_that_was_measured_faster(
    asked: FinetuneOptions, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "bfloat16 is multiplied in software here, which takes 9.6 times as long"
    assert chosen(asked) == (Compute.FLOAT32, expected)
    assert chosen(replace(asked, compute=Compute.STORED)) == (Compute.STORED, "")
    assert chosen(replace(asked, lora_rank=None)) == (Compute.STORED, ""), "all weights are trained in 32 bits anyway"
    monkeypatch.setattr(compute, "slowdown", lambda dtype, shape: 1.2)
    assert chosen(asked)[0] is Compute.STORED


def test_a_run_goes_on_as_it_began(asked: FinetuneOptions, slow: None) -> None:
    for began in Compute:
        options = replace(asked, compute=began)
        Checkpoint(options, [1], BaseRecord("model", None, {})).write(
            FinetuneProgress(1, None), [], {}, torch.get_rng_state()
        )
        assert chosen(asked)[0] is began
        going_on = Checkpoint(choose_compute(asked, CAUSAL)[0], [1], BaseRecord("model", None, {}))
        assert going_on.read([], {}) == FinetuneProgress(1, None)
    with pytest.raises(FinetuneError, match="belongs to other settings"):
        Checkpoint(replace(asked, compute=Compute.STORED), [1], BaseRecord("model", None, {})).read([], {})


def test_two_who_say_what_is_computed_in_are_refused(asked: FinetuneOptions) -> None:
    for other in ({"base": Quantization.NF4}, {"autocast": True}, {"dora": True}):
        with pytest.raises(FinetuneError, match=r"as does --compute float32; give one of them"):
            choose_compute(replace(asked, compute=Compute.FLOAT32, **other), CAUSAL)
    with pytest.raises(
        FinetuneError, match=r"--dora measures the rows of a weight, which a quantized one \(--base nf4\) does not have"
    ):
        choose_compute(replace(asked, dora=True, base=Quantization.NF4), CAUSAL)
