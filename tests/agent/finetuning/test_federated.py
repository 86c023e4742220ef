"""Adapters that federate: what a federation begins with, and rounds that end in a file with the bits
of training without a cut.
"""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import peft
import pytest
import safetensors.torch
import torch

from port_agent.federate.tensors import Arrays, FederatedTensorError, federated_tensors
from port_agent.finetuning.federated import FederatedRound, federated_job
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.finetuning.round_files import RoundFiles, open_round
from port_agent.finetuning.steering import Steering
from port_agent.finetuning.text.task import Task, TaskKind
from port_agent.finetuning.trained_model import load_model
from port_agent.finetuning.training import FinetuneOutcome, finetune
from port_agent.packing import Quantization
from port_agent.worker.worker_options import FinetuneWorkerOptions
from tests.agent.finetuning.tiny_model import TEXT, make_data, make_model


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> FinetuneOptions:
    folder = tmp_path_factory.mktemp("federated")
    model, data = make_model(folder / "model"), make_data(folder / "data.jsonl")
    return FinetuneOptions(
        str(model), (str(data),), str(folder / "out"), sequence_tokens=32, updates=3, learning_rate=0.02
    )


@pytest.fixture(scope="module")
def submitted(asked: FinetuneOptions) -> bytes:
    return b"".join(federated_job(job_of(asked)))


def job_of(options: FinetuneOptions) -> FinetuneJob:
    return FinetuneJob.of(options, ram_bytes=700 << 20, threads=1, page_dir=Path("/"))


@pytest.mark.slow
def test_a_federation_begins_with_an_adapter_as_peft_makes_them(
    asked: FinetuneOptions, submitted: bytes, tmp_path: Path
) -> None:
    (tmp_path / "bundle.port").write_bytes(submitted)
    job, tensors = FinetuneJob.read(tmp_path / "bundle.port"), federated_tensors(tmp_path / "bundle.port")
    own = peft.get_peft_model_state_dict(load_model(asked, Task(TaskKind.CAUSAL_LM), print))
    begun = tensors.initial()
    assert {name: array.shape for name, array in begun.items()} == {
        name: tuple(own[name].shape) for name in sorted(own)
    }
    assert job.sequences == tensors.samples > 3 and job.options == replace(asked, overwrite=True)
    for name, array in begun.items():
        bound = (own[name].shape[1]) ** -0.5 if "lora_A" in name else 0.0
        assert 0.5 * bound <= abs(array).max() <= bound, "A as nn.Linear has it, B zero"
    assert tensors.nbytes < len(submitted) < tensors.nbytes + 8192
    (tmp_path / "again.port").write_bytes(b"".join(federated_job(job_of(asked))))
    assert (tmp_path / "again.port").read_bytes() == submitted


def test_devices_with_another_base_are_not_averaged(asked: FinetuneOptions, submitted: bytes, tmp_path: Path) -> None:
    (tmp_path / "one.port").write_bytes(submitted)
    line, _, adapter = submitted.partition(b"\n")
    other = replace(asked, base=Quantization.NF4)
    (tmp_path / "other.port").write_bytes(job_of(other).encoded()[:-1] + b',"sequences":5}\n' + adapter)
    assert (
        federated_tensors(tmp_path / "one.port").fingerprint != federated_tensors(tmp_path / "other.port").fingerprint
    )
    (tmp_path / "alone.port").write_bytes(job_of(asked).encoded())
    with pytest.raises(FederatedTensorError, match="has no initial adapter; submit it with"):
        federated_tensors(tmp_path / "alone.port")
    (tmp_path / "cut.port").write_bytes(line + b"\n" + adapter[:40])
    with pytest.raises(FederatedTensorError, match="holds no weights"):
        federated_tensors(tmp_path / "cut.port")


def trained(
    options: FinetuneOptions, folder: Path, adapter: bytes, number: int | None
) -> tuple[FinetuneOutcome, bytes]:
    """Train a round in files, as a worker does; return what came of it."""
    (folder / "start").write_bytes(adapter)
    told = FinetuneWorkerOptions(
        bundle=folder, state_dir=folder, weights=folder / "start", out=folder / "result", round=number
    )
    files = open_round(told)
    assert isinstance(files, RoundFiles)
    outcome = finetune(options, lambda update: None, lambda text: None, None, FederatedRound.of(files))
    return outcome, (folder / "result").read_bytes() if number is not None else b""


@pytest.mark.slow
def test_rounds_train_on_from_what_is_given_and_go_on_in_the_data(
    asked: FinetuneOptions, submitted: bytes, tmp_path: Path
) -> None:
    options = replace(asked, out=str(tmp_path / "out"))
    begun = submitted.partition(b"\n")[2]
    outcome, first = trained(options, tmp_path, begun, 0)
    assert outcome.updates == 3 and not (tmp_path / "out").exists() and not (tmp_path / "out.state").exists()
    assert first != begun and trained(options, tmp_path, begun, 0)[1] == first
    assert trained(options, tmp_path, begun, 1)[1] != first, "another round sees other text"
    assert torch.initial_seed() == options.seed + 1, "and draws other masks"
    outcome, _ = trained(options, tmp_path, first, None)
    assert outcome.updates == 0
    written = safetensors.torch.load_file(tmp_path / "out" / "adapter_model.safetensors")
    averaged = safetensors.torch.load(first)
    assert written.keys() == averaged.keys() and all(torch.equal(written[name], averaged[name]) for name in written)
    peft.PeftConfig.from_pretrained(str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.process
def test_masked_sums_of_adapters_of_a_few_sequences_are_their_average(asked: FinetuneOptions, tmp_path: Path) -> None:
    """Three devices with 13 sequences came back as zeros where what is masked had the steps
    of weights, not of changes.
    """
    pytest.importorskip("flwr")
    from port_agent.federate.orders import global_file
    from tests.agent.federate.supervisor import Led

    files = []
    for part, records in enumerate((2, 4, 7)):
        data = tmp_path / f"data{part}.jsonl"
        data.write_text("".join(json.dumps({"text": TEXT[place:] * 3}) + "\n" for place in range(part, part + records)))
        options = replace(asked, data=(str(data),), out=str(tmp_path / f"out{part}"), held_out=0.0, learning_rate=1e-4)
        files.append(tmp_path / f"{part}.port")
        files[-1].write_bytes(b"".join(federated_job(job_of(options))))
    led = Led(tmp_path / "led", files)
    for part, member in enumerate(led.members.values()):
        member.changed = partial(change_by_training, FinetuneJob.read(files[part]).options, tmp_path)
    assert led.round(secure=True)["averaged"] == 3
    masked = led.averaged()
    (led.root / global_file(1)).unlink()
    assert led.round()["averaged"] == 3
    plain, begun = led.averaged(), federated_tensors(led.bundle).initial()
    assert sum(federated_tensors(file).samples for file in files) < 40
    for name, array in plain.items():
        change = np.abs(np.subtract(array, begun[name])).max()
        step = 2.0**-21 * 3 * 7 * change + np.spacing(np.abs(array).max())
        assert 0 < change < 1e-3 and np.abs(np.subtract(masked[name], array)).max() <= step


def change_by_training(options: FinetuneOptions, folder: Path, arrays: Arrays) -> Arrays:
    """Return what a round of a fine-tuning makes of its adapter."""
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    adapter = trained(options, folder, safetensors.torch.save(given), 0)[1]
    return {name: tensor.numpy() for name, tensor in sorted(safetensors.torch.load(adapter).items())}


@pytest.mark.slow
def test_a_checkpoint_of_another_round_is_passed_over(asked: FinetuneOptions, submitted: bytes, tmp_path: Path) -> None:
    options = replace(asked, out=str(tmp_path / "out"))
    begun = submitted.partition(b"\n")[2]
    whole = trained(options, tmp_path, begun, 0)[1]
    (tmp_path / "start").write_bytes(begun)

    def leave(number: int) -> FinetuneOutcome:
        """Train a round, told to leave after its first update."""
        steering = Steering()
        given = FederatedRound(begun, number, os.open(tmp_path / "part", os.O_WRONLY | os.O_CREAT))
        return finetune(options, lambda update: setattr(steering, "leaving", True), lambda text: None, steering, given)

    assert leave(0).left and trained(options, tmp_path, begun, 0)[1] == whole, "goes on with the same bits"
    assert leave(1).left and trained(options, tmp_path, begun, 0)[1] == whole, "of the other round nothing is used"


@pytest.mark.slow
def test_a_proximal_term_holds_adapters_near_those_of_the_round(
    asked: FinetuneOptions, submitted: bytes, tmp_path: Path
) -> None:
    options = replace(asked, out=str(tmp_path / "out"))
    held, begun = replace(options, proximal_mu=50.0), submitted.partition(b"\n")[2]
    once = trained(replace(options, updates=1), tmp_path, begun, 0)[1]
    assert trained(replace(held, updates=1), tmp_path, begun, 0)[1] == once, "the first update is where it began"
    free, near = (trained(one, tmp_path, begun, 0)[1] for one in (options, held))
    start = safetensors.torch.load(begun)

    def away(adapter: bytes) -> float:
        found = safetensors.torch.load(adapter)
        return sum((found[name] - start[name]).square().sum().item() for name in start)

    assert 0 < away(near) < away(free)
    steering = Steering()
    given = FederatedRound(begun, 0, os.open(tmp_path / "part", os.O_WRONLY | os.O_CREAT))
    assert finetune(held, lambda update: setattr(steering, "leaving", True), lambda text: None, steering, given).left
    assert trained(held, tmp_path, begun, 0)[1] == near, "continued from a checkpoint, it is held near the same"


def test_devices_with_another_proximal_term_are_not_averaged(
    asked: FinetuneOptions, submitted: bytes, tmp_path: Path
) -> None:
    adapter = submitted.partition(b"\n")[2]
    seen = set()
    for mu in (None, 0.1, 0.2):
        path = tmp_path / f"{mu}.port"
        job = job_of(replace(asked, proximal_mu=mu)).encoded()
        path.write_bytes(job[:-1] + b',"sequences":5}\n' + adapter)
        seen.add(federated_tensors(path).fingerprint)
    assert len(seen) == 3


def test_an_adapter_of_another_model_is_refused_by_name(asked: FinetuneOptions, submitted: bytes) -> None:
    model = load_model(asked, Task(TaskKind.CAUSAL_LM), print)
    tensors = safetensors.torch.load(submitted.partition(b"\n")[2])
    name = min(tensors)
    del tensors[name]
    with pytest.raises(FinetuneError, match=f"belongs to another model: {name} differs"):
        FederatedRound(safetensors.torch.save(tensors)).give(model)
    with pytest.raises(FinetuneError, match="the adapter of the federation is damaged"):
        FederatedRound(b"junk" * 10).give(model)
