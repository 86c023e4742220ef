"""Pointers that leave torch: numpy, DLPack, the buffer protocol, ctypes, and memory that comes from outside."""

import array
import ctypes
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.compare import training_begins
from benchmarks.follow_zoo.features.registry import Features, classify, learn, perceptron, rows, square

FEATURES = Features("escapes")


def _touched(touch: Callable[[nn.Module], Any]) -> Any:
    model, seen = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 8)), []
    result = learn(model, classify, after=lambda step: seen.append(touch(model)))
    return result, seen


def _numpy_written(model: nn.Module) -> Any:
    model[0].weight.detach().numpy()[:] *= 0.9


def _numpy_copied(model: nn.Module) -> Any:
    return model[0].weight.detach().numpy().copy()


def _numpy_converted(model: nn.Module) -> Any:
    return np.asarray(model[0].weight.detach()) @ np.ones(32, dtype=np.float32)


def _dlpack_written(model: nn.Module) -> Any:
    np.from_dlpack(model[2].weight.detach()).sum()
    torch.from_dlpack(model[2].weight.detach()).mul_(0.9)


def _pointer_written(model: nn.Module) -> Any:
    memory = (ctypes.c_float * 10).from_address(model[0].weight.data_ptr())
    memory[3] = 0.5
    return list(memory)


def _gradient_written_through_numpy(model: nn.Module) -> Any:
    model[0].weight.grad.numpy()[0] = 0
    return model[0].weight.grad.norm()


def _storage_items(model: nn.Module) -> Any:
    storage = model[0].bias.untyped_storage()
    storage[1] = 7
    return [storage[i] for i in range(8)]


def _storage_bytes(model: nn.Module) -> Any:
    return bytes(model[0].weight.untyped_storage().tolist())


def _storage_copied(model: nn.Module) -> Any:
    other = model[0].weight.untyped_storage().clone()
    model[0].weight.untyped_storage().copy_(other)
    return len(other), other.nbytes()


def _typed_storage(model: nn.Module) -> Any:
    storage = model[0].bias.detach().storage()
    storage[0] = 0.25
    return [storage[0], len(storage)]


def _scalars(model: nn.Module) -> Any:
    weight = model[0].weight
    return [
        weight[3, 4].item(),
        float(weight.sum()),
        int(weight[0, 0] * 1000),
        bool(weight[1, 1] > 0),
        weight[2].tolist(),
    ]


def _iterated(model: nn.Module) -> Any:
    return [float(x) for row in model[2].weight for x in row[:3]]


def _set_by_index(model: nn.Module) -> Any:
    with torch.no_grad():
        model[0].weight[3, 4] = 0.5
        model[0].weight[model[0].weight > 0.2] = 0.1
        model[0].weight[1] = torch.arange(32.0) / 100


def _looks_at_addresses(model: nn.Module) -> Any:
    return model[0].weight.data_ptr() == model[0].weight.detach().data_ptr()


def _format(model: nn.Module) -> Any:
    return f"{model[0].bias[0]:.6f} {model[0].bias.max().item()}"


def _numpy_function(model: nn.Module) -> Any:
    return np.tanh(model[0].weight.detach()).sum()


def _memory_view(model: nn.Module) -> Any:
    return bytes(memoryview(model[0].bias.detach().numpy()))


_TOUCHES: tuple[Callable[[nn.Module], Any], ...] = (
    _numpy_written, _numpy_copied, _numpy_converted, _dlpack_written, _pointer_written, _gradient_written_through_numpy,
    _storage_items, _storage_bytes, _storage_copied, _typed_storage, _scalars, _iterated, _set_by_index, _looks_at_addresses,
    _format, _numpy_function, _memory_view,
)  # fmt: skip
for _touch in _TOUCHES:
    FEATURES.named(_touch.__name__.strip("_"), partial(_touched, _touch))


@FEATURES.add
def numpy_view_held_for_the_whole_run() -> Any:
    model = perceptron()
    view = model[0].weight.detach().numpy()
    seen = []

    def write(step: int) -> None:
        seen.append(view.copy())
        view[step] = step

    return learn(model, classify, after=write), seen


@FEATURES.add
def numpy_view_taken_inside_and_held() -> Any:
    model, views = perceptron(), []

    def write(step: int) -> None:
        if not views:
            views.append(model[0].weight.detach().numpy())
        views[0][step] = step / 10

    return learn(model, classify, after=write, steps=6), views


@FEATURES.add
def batches_share_memory_with_numpy() -> Any:
    data = np.random.randn(16, 32).astype(np.float32)
    x = torch.from_numpy(data)

    def refill(step: int) -> None:
        data[:] = np.random.randn(16, 32)

    return learn(perceptron(), lambda m: square(m(x)), after=refill)


@FEATURES.add
def weights_share_memory_with_numpy() -> Any:
    held = np.random.randn(64, 32).astype(np.float32)
    weight = nn.Parameter(torch.from_numpy(held))
    result = learn(nn.ParameterList([weight]), lambda m: square(rows() @ m[0].T))
    return result, held


@FEATURES.add
def mapped_file_of_numpy() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.bin"
        np.random.randn(400, 32).astype(np.float32).tofile(path)
        data = np.memmap(path, dtype=np.float32, mode="r", shape=(400, 32))

        def loss(m: nn.Module) -> Tensor:
            start = int(torch.randint(0, 380, (1,)))
            return square(m(torch.from_numpy(data[start : start + 16].copy())))

        return learn(perceptron(), loss)


@FEATURES.add
def mapped_file_of_torch() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shared.bin"
        path.write_bytes(bytes(64 * 32 * 4))
        shared = torch.from_file(str(path), shared=True, size=64 * 32).view(64, 32)
        training_begins()
        for step in range(3):
            shared.add_(torch.randn(64, 32)).mul_(1 + step)
        return shared.clone(), path.read_bytes()


@FEATURES.add
def memory_from_the_buffer_protocol() -> Any:
    held = array.array("f", [0.1] * 512)
    x = torch.frombuffer(held, dtype=torch.float32).view(16, 32)

    def change(step: int) -> None:
        held[step] = 1.0 + step

    return learn(perceptron(), lambda m: square(m(x)), after=change)


@FEATURES.add
def noise_from_numpy() -> Any:
    def loss(m: nn.Module) -> Tensor:
        return square(m(rows() + torch.from_numpy(np.random.randn(16, 32).astype(np.float32))))

    return learn(perceptron(), loss)


def _control_by_values(read: Callable[[Tensor], bool]) -> Any:
    model = perceptron()

    def loss(m: nn.Module) -> Tensor:
        out = m(rows())
        if read(out.mean()):
            out = out * 2
        while read(out.sum() - 1e9) and len(out) > 4:
            out = out[:-1]
        return square(out)

    return learn(model, loss)


FEATURES.named("branches_by_truth", partial(_control_by_values, lambda t: bool(t > 0)))
FEATURES.named("branches_by_item", partial(_control_by_values, lambda t: t.item() > 0))
FEATURES.named("branches_by_numpy", partial(_control_by_values, lambda t: float(t.detach().numpy()) > 0))
