"""`finetune` as a function: within its budget, with the bits of the recipe left alone."""

import os
import signal
from pathlib import Path

import pytest

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.foreground.finetune import FinetuneRequest, finetune
from port_agent.worker.protocol import Event, StepDone
from tests.agent.finetuning.left_alone import WEIGHTS, adapter_left_alone
from tests.agent.finetuning.tiny_model import make_data, make_model


@pytest.mark.slow
@pytest.mark.process
def test_it_has_the_bits_of_the_recipe_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model", hidden_size=128)
    make_data(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    options = FinetuneOptions("model", ("data.jsonl",), "out", sequence_tokens=32, updates=3, learning_rate=0.01)
    report = finetune(FinetuneRequest(options=options, ram_bytes=700 << 20, threads=1))
    assert report.steps == 3 and report.result is not None and report.result.out == str(tmp_path / "out")
    assert 0 < report.peak_rss_bytes < 700 << 20
    made = (tmp_path / "out" / WEIGHTS).read_bytes()
    assert made == adapter_left_alone(
        FinetuneOptions("model", ("data.jsonl",), "alone", sequence_tokens=32, updates=3, learning_rate=0.01)
    )


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_keeps_what_is_done_and_the_same_request_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "model", hidden_size=128)
    make_data(tmp_path / "data.jsonl")
    monkeypatch.chdir(tmp_path)
    options = FinetuneOptions(
        "model", ("data.jsonl",), "out", valid=("data.jsonl",), sequence_tokens=32, updates=40, learning_rate=0.01
    )

    def press(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    request = FinetuneRequest(options=options, ram_bytes=700 << 20, threads=1)
    first = finetune(request, press)
    assert 2 <= first.steps < 40 and first.result is None
    rest = finetune(request)
    assert first.steps + rest.steps == 40 and rest.result is not None and (tmp_path / "out" / WEIGHTS).exists()


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    options = FinetuneOptions(str(tmp_path / "none"), ("data",), "out")
    with pytest.raises(FinetuneError, match="none"):
        finetune(FinetuneRequest(options=options, ram_bytes=1 << 30))
