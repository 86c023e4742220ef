"""Jobs of devices that have different data for the same model: gestures, which ship with the examples."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_planner.ir.bundle.safetensors_io import Chunks, encode
from port_planner.job import TrainingJob
from tests.agent.jobs_small import classify, write_job

GESTURES = Path(__file__).resolve().parents[3] / "examples/imu_gestures/gestures.npz"

needs_flower = pytest.mark.skipif(not find_spec("flwr"), reason="Flower is not installed: pip install '.[federate]'")


class Gestures(nn.Module):
    """A frozen layer below trained ones with a normalisation, as an adapted model has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.below, self.norm, self.head = nn.Linear(6 * 16, 24), nn.BatchNorm1d(24), nn.Linear(24, 3)
        self.below.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 6, 16) -> (batch, 3)."""
        logits: torch.Tensor = self.head(torch.tanh(self.norm(self.below(x.flatten(1)))))
        return logits


def gestures_job(part: int, parts: int, below: float = 0.0) -> TrainingJob:
    """Return the job of one device: every class, but other windows. `below`: what is added to the frozen layer."""
    with np.load(GESTURES) as archive:
        x, y = archive["x"][part::parts, :, ::4], archive["y"][part::parts]
    data = (torch.tensor(x.astype(np.float32)), torch.tensor(y.astype(np.int64)))
    model = Gestures()
    with torch.no_grad():
        model.below.weight.add_(below)
    trained = [one for one in model.parameters() if one.requires_grad]
    return TrainingJob(model, classify, torch.optim.SGD(trained, lr=0.05, momentum=0.9), data, 16)


def alike_job(part: int, mu: float | None = None) -> TrainingJob:
    """Return the job of one device whose samples are all the same: whatever their order, the bits are.

    `mu`: of a proximal term.
    """
    torch.manual_seed(3)
    model, count = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)), 3 + 2 * part
    row = torch.randn(1, 12, generator=torch.Generator().manual_seed(part))
    data = (row.repeat(count, 1), torch.full((count,), part))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return TrainingJob(model, classify, optimizer, data, count, proximal_mu=mu)


def averaged_by_hand(rounds: int, parts: list[int], epochs: int, mu: float = 0.0) -> dict[str, NDArray[np.float32]]:
    """Return the weights after rounds of plain PyTorch and FedAvg, summed in the order of `parts`."""
    jobs = [alike_job(part) for part in parts]
    counts = [len(job.data[0]) for job in jobs]
    weights = {name: tensor.numpy() for name, tensor in jobs[0].model.state_dict().items()}
    for _ in range(rounds):
        trained = [_trained_by_hand(part, weights, epochs, mu) for part in parts]
        shares = [
            [array * (count / sum(counts)) for array in one.values()]
            for one, count in zip(trained, counts, strict=True)
        ]
        weights = dict(zip(weights, map(sum, zip(*shares, strict=True)), strict=True))
    return weights


def _trained_by_hand(
    part: int, weights: dict[str, NDArray[np.float32]], epochs: int, mu: float
) -> dict[str, NDArray[np.float32]]:
    job, begun = alike_job(part), {name: torch.from_numpy(array) for name, array in weights.items()}
    job.model.load_state_dict(begun)
    for _ in range(epochs):
        job.optimizer.zero_grad()
        loss, _ = classify(job.model, *job.data)
        for name, parameter in job.model.named_parameters() if mu else ():
            loss = loss + mu / 2 * (parameter - begun[name]).square().sum()
        loss.backward()
        job.optimizer.step()
    return {name: tensor.numpy().copy() for name, tensor in job.model.state_dict().items()}


def adapter_file(path: Path, tensors: Mapping[str, Chunks] | None = None) -> Path:
    """Write the file of a fine-tuning that federates a small adapter, or these tensors; its
    model and data are nowhere.
    """
    options = FinetuneOptions("/model", ("/data.jsonl",), "/out")
    job = FinetuneJob(
        options=options, ram_bytes=600 << 20, threads=1, page_dir="/", weights={"m": "ab"}, data_sha256="", sequences=9
    )
    numbers = np.arange(6, dtype=np.float32).tobytes()
    small = {name: Chunks("float32", (2, 3), lambda: [numbers]) for name in ("q.lora_A.weight", "q.lora_B.weight")}
    path.write_bytes(b"".join([job.encoded(), b"\n", *encode(tensors or small)]))
    return path


def gestures_bundle(folder: Path, part: int, parts: int = 3) -> Path:
    """Return the bundle of one device."""
    path = folder / f"gestures{part}.port"
    write_job(path, gestures_job(part, parts), seeds=(0,), ram_bytes=1 << 30)
    return path


def alike_bundle(folder: Path, part: int, mu: float | None = None) -> Path:
    """Return the bundle of a device of `alike_job`."""
    path = folder / f"alike{part}.port"
    write_job(path, alike_job(part, mu), seeds=(0,), ram_bytes=1 << 30)
    return path
