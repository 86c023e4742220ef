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


def test_what_was_measured_faster_is_the_default_whatever_instructions_there_are(
    asked: FinetuneOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "in_software", lambda dtype: False)
    monkeypatch.setattr(compute, "slowdown", lambda dtype, shape: 3.0)
    assert chosen(asked) == (Compute.FLOAT32, "a product of its layers takes 3.0 times as long in bfloat16 here")
    monkeypatch.setattr(compute, "slowdown", lambda dtype, shape: 0.5)
    assert chosen(asked) == (Compute.STORED, "")
    assert chosen(replace(asked, compute=Compute.FLOAT32)) == (Compute.FLOAT32, "as asked for")


def test_one_without_computes_in_float32_where_that_was_measured_faster(
    asked: FinetuneOptions, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "a product of its layers takes 9.6 times as long in bfloat16 here"
    assert chosen(asked) == (Compute.FLOAT32, expected)
    assert chosen(replace(asked, compute=Compute.STORED)) == (Compute.STORED, "")
    assert chosen(replace(asked, lora_rank=None)) == (Compute.STORED, ""), "all weights are trained in 32 bits anyway"
    monkeypatch.setattr(compute, "slowdown", lambda dtype, shape: 1.2)
    assert chosen(asked)[0] is Compute.STORED


def test_the_product_has_the_models_own_shape_within_bounds(
    asked: FinetuneOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = list[tuple[int, int, int]]()

    def measured(dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
        shapes.append(shape)
        return 1.0

    monkeypatch.setattr(compute, "slowdown", measured)
    chosen(replace(asked, sequence_tokens=48))
    chosen(replace(asked, sequence_tokens=480, model=str(make_model(tmp_path / "wide", 480))))
    assert shapes == [(48, 256, 256), (64, 480, 960)]


def test_a_run_goes_on_as_it_began(asked: FinetuneOptions, slow: None) -> None:
    for began in Compute:
        options = replace(asked, compute=began)
        Checkpoint(options, [1], BaseRecord("model", None, {})).write(
            FinetuneProgress(1, None), [], {}, (torch.get_rng_state(),)
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
