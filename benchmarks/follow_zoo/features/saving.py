"""Saving, loading, copying and resuming inside a budget."""

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, load_file, load_model, save, save_file, save_model
from torch import nn

from benchmarks.follow_zoo.compare import state, training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square

FEATURES = Features("saving")


def _saved(save: Callable[[nn.Module, Path], Any]) -> Any:
    """Train, save after each step, and return the contents of the files."""
    model, held = nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 8)), []
    with tempfile.TemporaryDirectory() as folder:
        result = learn(model, classify, after=lambda step: held.append(save(model, Path(folder) / f"{step}")))
    return result, held


def _save_file(model: nn.Module, path: Path) -> Any:
    torch.save(model.state_dict(), path)
    return path.read_bytes()


def _save_old_format(model: nn.Module, path: Path) -> Any:
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    return torch.load(path)


def _save_bytes(model: nn.Module, path: Path) -> Any:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


def _save_whole_model(model: nn.Module, path: Path) -> Any:
    torch.save(model, path)
    return torch.load(path, weights_only=False).state_dict()


def _load_mapped(model: nn.Module, path: Path) -> Any:
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, mmap=True))
    return [p.sum() for p in model.parameters()]


def _load_assigned(model: nn.Module, path: Path) -> Any:
    torch.save(model.state_dict(), path)
    other = copy.deepcopy(model)
    other.load_state_dict(torch.load(path), assign=True)
    return other.state_dict()


def _save_safetensors(model: nn.Module, path: Path) -> Any:
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, path)
    return path.read_bytes()


def _load_safetensors(model: nn.Module, path: Path) -> Any:
    save_file(model.state_dict(), path)
    model.load_state_dict(load_file(path))
    return [p.sum() for p in model.parameters()]


def _tied(model: nn.Module) -> nn.Module:
    """Return a model whose heads share a weight, alongside the one that is trained."""
    heads = nn.ModuleList([nn.Linear(96, 96, bias=False) for _ in range(2)])
    heads[1].weight = heads[0].weight
    return nn.ModuleDict({"trained": model, "heads": heads})


def _safetensors_model(model: nn.Module, path: Path) -> Any:
    both = _tied(model)
    save_model(both, str(path))
    for parameter in both.parameters():
        parameter.data.zero_()
    return load_file(path), load_model(both, path), [p.sum() for p in both.parameters()]


def _safetensors_bytes(model: nn.Module, path: Path) -> Any:
    model.load_state_dict(load(save(model.state_dict())))
    return [p.sum() for p in model.parameters()]


def _hub_shards(model: nn.Module, path: Path) -> Any:
    from huggingface_hub import load_torch_model, save_torch_model

    path.mkdir()
    both = _tied(model)
    save_torch_model(both, path, max_shard_size=10_000)
    for parameter in both.parameters():
        parameter.data.zero_()
    load_torch_model(both, path)
    shards = {file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return shards, [p.sum() for p in both.parameters()]


def _one_vector(model: nn.Module, path: Path) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    np.save(path.with_suffix(".npy"), vector.detach().numpy())
    nn.utils.vector_to_parameters(torch.from_numpy(np.load(path.with_suffix(".npy"))), model.parameters())
    return [p.sum() for p in model.parameters()]


def _swapped(model: nn.Module, path: Path) -> Any:
    other = copy.deepcopy(model[0].weight)
    torch.utils.swap_tensors(other, model[0].weight)
    return other.sum(), model[0].weight.sum()


def _appended(model: nn.Module, path: Path) -> Any:
    with path.open("wb") as file:
        for tensor in model.state_dict().values():
            file.write(memoryview(tensor.numpy()).cast("B"))
    return path.read_bytes()


def _pickled(model: nn.Module, path: Path) -> Any:
    return pickle.loads(pickle.dumps(model.state_dict(), protocol=5))


def _pickled_model(model: nn.Module, path: Path) -> Any:
    return pickle.loads(pickle.dumps(model)).state_dict()


def _numpy_files(model: nn.Module, path: Path) -> Any:
    np.savez(path.with_suffix(".npz"), **{n: t.numpy() for n, t in model.state_dict().items()})
    return dict(np.load(path.with_suffix(".npz")))


def _storage_files(model: nn.Module, path: Path) -> Any:
    with path.open("wb") as file:
        model[0].weight.untyped_storage()._write_file(file, True, False, 4)
    return path.read_bytes()


def _exported(model: nn.Module, path: Path) -> Any:
    return torch.jit.trace(copy.deepcopy(model).eval(), torch.ones(4, 32)).state_dict()


_WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "torch_save_file": _save_file,
    "torch_save_old_format": _save_old_format,
    "torch_save_bytes": _save_bytes,
    "torch_save_whole_model": _save_whole_model,
    "torch_load_mapped": _load_mapped,
    "torch_load_assigned": _load_assigned,
    "safetensors_save": _save_safetensors,
    "safetensors_load": _load_safetensors,
    "safetensors_model": _safetensors_model,
    "safetensors_bytes": _safetensors_bytes,
    "hub_shards": _hub_shards,
    "one_vector": _one_vector,
    "swapped_tensors": _swapped,
    "memoryviews": _appended,
    "pickle_state": _pickled,
    "pickle_model": _pickled_model,
    "numpy_files": _numpy_files,
    "storage_files": _storage_files,
    "traced_copy": _exported,
    "deepcopy_model": lambda model, path: copy.deepcopy(model).state_dict(),
    "deepcopy_state": lambda model, path: copy.deepcopy(model.state_dict()),
    "copy_of_state": lambda model, path: copy.copy(model.state_dict()),
    "clones": lambda model, path: {n: t.clone() for n, t in model.state_dict().items()},
    "lists": lambda model, path: {n: t.tolist() for n, t in model.state_dict().items()},
    "text": lambda model, path: {n: str(t) for n, t in model.state_dict().items()},
}
for _name, _way in _WAYS.items():
    FEATURES.named(_name, partial(_saved, _way))


def _resumed(everything: Callable[[Any], Any]) -> Any:
    """Train two steps, save everything, and continue from the file with new objects."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"checkpoint-{epoch}" for epoch in range(3)]  # the one before may still be mapped
        for epoch, path in enumerate(paths):
            model = perceptron()
            optimizer = torch.optim.AdamW(model.parameters(), foreach=epoch % 2 == 0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            if epoch == 0:
                training_begins()
            else:
                saved = everything(paths[epoch - 1])
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                scheduler.load_state_dict(saved["scheduler"])
                torch.set_rng_state(saved["random"])
            for _ in range(2):
                classify(model).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save({n: p.state_dict() for n, p in parts.items()} | {"random": torch.get_rng_state()}, path)
        return path.read_bytes(), state(model, optimizer)


FEATURES.named("resumed", partial(_resumed, torch.load))
FEATURES.named("resumed_mapped", partial(_resumed, lambda path: torch.load(path, mmap=True)))
FEATURES.named("resumed_without_weights_only", partial(_resumed, lambda path: torch.load(path, weights_only=False)))


@FEATURES.add
def best_weights_kept_and_restored() -> Any:
    model, best = perceptron(), {}
    lowest = [float("inf")]

    def keep(step: int) -> None:
        with torch.no_grad():
            loss = classify(model).item()
        if loss < lowest[0]:
            lowest[0] = loss
            best.update(copy.deepcopy(model.state_dict()))

    result = learn(model, classify, after=keep)
    model.load_state_dict(best)
    return result, state(model)


@FEATURES.add
def pretrained_file_mapped_and_trained() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file({"frozen": torch.randn(256, 256), "trained": torch.randn(256, 256)}, path)
        training_begins()
        weights = load_file(path)
        trained = weights["trained"].requires_grad_()
        optimizer = torch.optim.AdamW([trained])
        for _ in range(4):
            square(torch.randn(16, 256) @ weights["frozen"] @ trained).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights, state(optimizer)


@FEATURES.add
def copies_of_a_module_trained_apart() -> Any:
    first = perceptron()
    second = copy.deepcopy(first)
    return learn(first, classify), learn(second, classify)


@FEATURES.add
def shared_parts_saved_once() -> Any:
    whole = torch.randn(200, 32)
    parts = {"all": whole, "some": whole[10:20], "column": whole[:, 1]}
    training_begins()
    with torch.no_grad():
        whole.mul_(2)
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()))
    loaded["some"].zero_()
    return buffer.getvalue(), loaded


@FEATURES.add
def printed_while_training() -> Any:
    model, said = perceptron(), []
    result = learn(model, classify, after=lambda step: said.append(f"{model[0].weight!r} {model[3].bias.mean():.8f}"))
    return result, said


@FEATURES.add
def hashed_while_training() -> Any:
    model, said = perceptron(), []
    result = learn(model, classify, after=lambda step: said.append(torch.hash_tensor(rows()).item() if step else 0))
    return result, said
