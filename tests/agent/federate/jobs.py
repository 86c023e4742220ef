"""Jobs of devices that have different data for the same model: gestures, which ship with the examples."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
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


def gestures_job(part: int, parts: int) -> TrainingJob:
    """Return the job of one device: every class, but other windows."""
    with np.load(GESTURES) as archive:
        x, y = archive["x"][part::parts, :, ::4], archive["y"][part::parts]
    data = (torch.tensor(x.astype(np.float32)), torch.tensor(y.astype(np.int64)))
    model = Gestures()
    trained = [one for one in model.parameters() if one.requires_grad]
    return TrainingJob(model, classify, torch.optim.SGD(trained, lr=0.05, momentum=0.9), data, 16)


def adapter_file(path: Path) -> Path:
    """Write the file of a fine-tuning that federates a small adapter; its model and data are nowhere."""
    options = FinetuneOptions("/model", ("/data.jsonl",), "/out")
    job = FinetuneJob(
        options=options, ram_bytes=600 << 20, threads=1, page_dir="/", weights={"m": "ab"}, data_sha256="", sequences=9
    )
    numbers = np.arange(6, dtype=np.float32).tobytes()
    tensors = {name: Chunks("float32", (2, 3), lambda: [numbers]) for name in ("q.lora_A.weight", "q.lora_B.weight")}
    path.write_bytes(b"".join([job.encoded(), b"\n", *encode(tensors)]))
    return path


def gestures_bundle(folder: Path, part: int, parts: int = 3) -> Path:
    """Return the bundle of one device."""
    path = folder / f"gestures{part}.port"
    write_job(path, gestures_job(part, parts), seeds=(0,), ram_bytes=1 << 30)
    return path
