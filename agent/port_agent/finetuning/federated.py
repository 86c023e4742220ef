"""Adapters that federate: the initial one of a federation, and rounds of training between two averages."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError

from port_agent.finetuning.inputs.earlier_adapter import ADAPTER_WEIGHTS
from port_agent.finetuning.inputs.libraries import peft
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.job_file import FinetuneJob
from port_agent.finetuning.round_files import RoundFiles
from port_agent.finetuning.text.task import Task
from port_agent.finetuning.text.tokenizing import TokenizerHere
from port_agent.finetuning.trained_model import outline, with_adapters


@dataclass(frozen=True, slots=True)
class FederatedRound:
    """The input of a round: `adapter`, the content of a safetensors file, and the number of rounds that this job
    trained before.

    `result`: the descriptor for the trained adapter. Without `number` and `result`, nothing is trained, and
    the adapter is the result.
    """

    adapter: bytes
    number: int | None = None
    result: int | None = None

    @classmethod
    def of(cls, files: RoundFiles) -> "FederatedRound":
        """Return the round read from inherited descriptors; raises OSError."""
        with os.fdopen(files.weights, "rb") as stream:
            adapter = stream.read()
        if files.result is not None:
            os.set_inheritable(files.result, False)
        return cls(adapter, files.number, files.result)

    @property
    def name(self) -> str:
        """A name that differs from every other round's."""
        return f"{self.number}, {hashlib.sha256(self.adapter).hexdigest()}"

    @property
    def trains(self) -> bool:
        """Whether this round trains."""
        return self.result is not None

    def give(self, model: Any) -> None:
        """Initialize a model's adapters for the round. Raises FinetuneError for an adapter of another model."""
        give_adapter(model, self.adapter, "the adapter of the federation")

    def take(self, model: Any) -> None:
        """Write the trained adapters durably to the round's result; raises OSError."""
        if self.result is None:
            return
        with os.fdopen(self.result, "wb") as stream:
            stream.write(_file(adapter_of(model)))
            stream.flush()
            os.fsync(stream.fileno())


def give_adapter(model: Any, content: bytes, what: str) -> None:
    """Initialize a model's adapters from a file's content. Raises FinetuneError for an adapter of another model."""
    try:
        given = safetensors.torch.load(content)
    except SafetensorError as error:
        raise FinetuneError(f"{what} is damaged ({error})") from error
    own = adapter_of(model)
    other = [n for n in {*own, *given} if n not in own or n not in given or own[n].shape != given[n].shape]
    if other:
        raise FinetuneError(f"{what} belongs to another model: {min(other)} differs")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(given[name])


def give_adapter_of(model: Any, folder: Path) -> None:
    """Initialize a model's adapters from a directory.

    Raises FinetuneError if it contains none, and as `give_adapter` does.
    """
    path = folder / ADAPTER_WEIGHTS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FinetuneError(f"{path}: {error.strerror}; give the directory of an adapter") from error
    give_adapter(model, content, str(path))


def federated_job(job: FinetuneJob) -> Iterator[bytes]:
    """Yield the file of a job that federates, with its initial adapter drawn by the seed. Raises FinetuneError,
    OSError.
    """
    options = job.options
    folder = Path(options.model)
    data = TokenizerHere(options).tokenized()
    task = data.task
    if task.labels:
        raise FinetuneError(
            "a head for labels does not federate, because devices may have different labels; leave out the labels or "
            "--federated"
        )
    yield msgspec.structs.replace(job, sequences=len(data.split.train)).encoded() + b"\n"
    yield _file(_initial_adapter(folder, options, task))


def _initial_adapter(folder: Path, options: FinetuneOptions, task: Task) -> Mapping[str, torch.Tensor]:
    """Return adapters as peft creates them, for a model whose weights are not read."""
    torch.manual_seed(options.seed)
    model = with_adapters(outline(folder, task), options, task)
    layer: Any
    for layer in model.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            for part in (layer.lora_A, layer.lora_B):
                part.to_empty(device="cpu")
            reset: Any = layer.reset_lora_parameters
            for adapter in layer.lora_A:
                reset(adapter, init_lora_weights=True)
    return adapter_of(model)


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's adapters by the names under which peft writes them."""
    found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(model)
    return found


def _file(adapter: Mapping[str, torch.Tensor]) -> bytes:
    content: bytes = safetensors.torch.save({name: tensor.detach().contiguous() for name, tensor in adapter.items()})
    return content
