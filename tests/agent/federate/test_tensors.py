"""What of a job is averaged, and that it comes back as it went."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from port_agent.federate.tensors import (
    FederatedTensorError,
    FederatedTensors,
    _narrowed,
    _widened,
    federated_tensors,
    tensors_of,
)
from port_agent.training.comparison import tensor_checksum
from port_planner.ir.bundle.safetensors_io import Chunks
from port_planner.job import TrainingJob
from tests.agent.federate.jobs import adapter_file, gestures_bundle, gestures_job
from tests.agent.jobs_small import classify, write_job


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> FederatedTensors:
    return federated_tensors(gestures_bundle(tmp_path_factory.mktemp("bundle"), 0))


@pytest.mark.slow
def test_what_training_changes_is_averaged_and_nothing_else(tensors: FederatedTensors) -> None:
    assert list(tensors.layouts) == [
        "head.bias",
        "head.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.weight",
    ]
    state = gestures_job(0, 3).model.state_dict()
    initial = tensors.initial()
    assert all(np.array_equal(array, state[name].numpy()) for name, array in initial.items())
    assert tensors.nbytes == sum(array.nbytes for array in initial.values())


def test_written_and_read_they_are_the_same(tensors: FederatedTensors, tmp_path: Path) -> None:
    numbers = np.random.default_rng(1)
    arrays = {
        name: numbers.standard_normal(array.shape).astype(array.dtype) for name, array in tensors.initial().items()
    }
    tensors.write(tmp_path / "weights.safetensors", arrays)
    back = tensors.read(tmp_path / "weights.safetensors")
    assert list(back) == list(arrays) and all(np.array_equal(back[name], arrays[name]) for name in arrays)


def test_other_tensors_are_refused(tensors: FederatedTensors, tmp_path: Path) -> None:
    good = tensors.initial()
    for wrong, message in (
        ({"head.bias": good["head.bias"]}, "it has 1 tensors, not the 6"),
        ({**good, "head.bias": np.zeros(4, np.float32)}, r"head.bias is float32 \[4\], not float32 \[3\]"),
        ({**good, "head.bias": good["head.bias"].astype(np.float64)}, "head.bias is float64"),
        ({**good, "head.bias": np.full(3, np.nan, np.float32)}, "head.bias has numbers that are not finite"),
    ):
        with pytest.raises(FederatedTensorError, match=message):
            tensors.check(wrong)
    (tmp_path / "junk").write_bytes(b"junk" * 10)
    with pytest.raises(FederatedTensorError, match="holds no weights"):
        tensors.read(tmp_path / "junk")


@pytest.mark.slow
def test_other_shapes_have_another_fingerprint(tensors: FederatedTensors, tmp_path: Path) -> None:
    other = federated_tensors(gestures_bundle(tmp_path, 1))
    assert other.fingerprint == tensors.fingerprint
    write_job(tmp_path / "frozen.port", gestures_job(0, 3, below=1e-3), seeds=(0,), ram_bytes=1 << 30)
    assert federated_tensors(tmp_path / "frozen.port").fingerprint != tensors.fingerprint, "over other frozen weights"
    checksum = tensor_checksum(gestures_job(0, 3).model.get_parameter("below.weight").detach())
    assert f"parameter/below.weight {checksum}" in tensors.base, "the same in whatever blocks and files it is"
    fewer = replace(other, layouts={name: one for name, one in other.layouts.items() if name != "head.bias"})
    assert fewer.fingerprint != tensors.fingerprint


@pytest.mark.slow
def test_data_of_its_own_is_counted_and_known_wherever_it_lies(tmp_path: Path) -> None:
    one, other = gestures_bundle(tmp_path, 0), gestures_bundle(tmp_path, 1)
    rows, labels = (column.numpy() for column in gestures_job(1, 3).data)
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data/a.npz", rows[:20], labels[:20])
    np.savez(tmp_path / "data/b.npz", np.asfortranarray(rows[20:]), labels[20:])
    given, bundled = tensors_of(one, tmp_path, tmp_path / "data"), tensors_of(other, tmp_path)
    assert given == bundled and given.samples == len(labels) and given.data != tensors_of(one, tmp_path).data
    (tmp_path / "data/b.npz").unlink()
    fewer = tensors_of(one, tmp_path, tmp_path / "data")
    assert fewer.samples == 20 and fewer.data != given.data
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["data"], "its copies are gone"


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_half_precision_is_averaged_in_32_bits_and_rounded_as_torch_rounds(name: str) -> None:
    values = torch.cat(
        [torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10.0, torch.tensor([0.0, -0.0, 1e-8])]
    )
    narrow = values.to(getattr(torch, name))
    given = narrow.view(torch.int16).numpy().tobytes()
    assert np.array_equal(_widened(given, name), narrow.float().numpy())
    assert _narrowed(values.numpy(), name).tobytes() == given


class Waves(nn.Module):
    """Complex weights, which a step trains."""

    def __init__(self) -> None:
        super().__init__()
        self.waves, self.head = nn.Parameter(torch.ones(12, dtype=torch.complex64)), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 12) -> (batch, 3)."""
        logits: torch.Tensor = self.head((self.waves * x).abs())
        return logits


@pytest.mark.slow
def test_trained_numbers_that_cannot_be_averaged_are_refused_by_name(tmp_path: Path) -> None:
    model, data = Waves(), (torch.randn(8, 12), torch.arange(8) % 3)
    write_job(
        tmp_path / "waves.port", TrainingJob(model, classify, torch.optim.SGD(model.parameters(), lr=0.1), data, 4)
    )
    with pytest.raises(FederatedTensorError, match="training changes waves of type complex64, which cannot be"):
        federated_tensors(tmp_path / "waves.port")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_numbers_that_half_precision_cannot_hold_are_refused(tmp_path: Path, name: str) -> None:
    kind = getattr(torch, name)
    largest = torch.tensor(torch.finfo(kind).max).float()
    bits = int(largest.view(torch.int32))
    half_a_step = 1 << (22 - (10 if name == "float16" else 7))
    below, beyond = (
        torch.tensor(bits + more, dtype=torch.int32).view(torch.float32) for more in (half_a_step - 1, half_a_step)
    )
    assert below.to(kind).isfinite() and beyond.to(kind).isinf(), "as torch rounds"
    tensors = federated_tensors(adapter_file(tmp_path / "job.port", {"a": Chunks(name, (1,), lambda: [bytes(2)])}))
    tensors.check({"a": -below.reshape(1).numpy()})
    with pytest.raises(FederatedTensorError, match=f"a has numbers that {name} cannot hold"):
        tensors.check({"a": -beyond.reshape(1).numpy()})
