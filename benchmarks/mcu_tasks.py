"""Five real adaptation tasks for microcontrollers: a model learns one domain, then has to follow a shift on the device.

- digits: MNIST at 8x8, upright; then the camera is turned by 90 degrees. The network is the one for the Cortex-M0.
- keywords: MFCC features of 12 words; then another microphone, whose frequency response adds a constant to
  each cepstral coefficient.
- gestures: accelerometer and gyroscope windows; then the board is mounted the other way round (x
  and y swapped, z negated).
- camera: CIFAR-10 drawn to 80 x 80, upright; then the camera is turned by 90 degrees.
- mobilenet: MNIST drawn to 96 x 96 in three channels, upright; then the camera is turned by 90 degrees.

The data sets are in `shared/data` next to the checkout and are not part of the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from port_planner.base.errors import PortError
from port_planner.mcu.zoo import CameraNet, DigitsNet, MobileNetV2, StreamNet

FloatArray = NDArray[np.float32]
LabelArray = NDArray[np.int64]
DATA = Path(__file__).resolve().parents[1] / "../shared/data"


class DataMissingError(PortError):
    """Raised when a data set is not next to the checkout."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} does not exist; put the reference data beside the checkout as shared/data")


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs [N, ...] and labels [N]."""

    inputs: FloatArray
    labels: LabelArray


@dataclass(frozen=True, slots=True)
class Split:
    """One seed's data: what the model learned before, what the device sees, and what judges it."""

    before: Samples
    train: Samples
    test: Samples


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its model, its data by seed, and how long the device trains."""

    name: str
    model: Callable[[], nn.Module]
    split: Callable[[int], Split]
    epochs: int
    rate: float | None = None
    """Learning rate of fp32 and int8 alike, where trying a grid of them on several seeds would take hours: the best of
    0.003, 0.01 and 0.03 for fp32 on seed 100.
    """


def _load(name: str) -> dict[str, NDArray[np.generic]]:
    path = DATA / name
    if not path.is_file():
        raise DataMissingError(path)
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def _pick(samples: Samples, index: NDArray[np.int64]) -> Samples:
    return Samples(np.ascontiguousarray(samples.inputs[index]), samples.labels[index])


def digits(seed: int) -> Split:
    """Return upright digits to pretrain on and turned ones to adapt to."""
    data = _load("mnist_train9k_test10k.npz")
    train = _small_digits(data["train_images"], data["train_labels"])
    test = _small_digits(data["test_images"], data["test_labels"])
    order = np.random.default_rng(seed).permutation(len(train.labels))
    judged = np.random.default_rng(seed + 1000).permutation(len(test.labels))[:2000]
    return Split(_pick(train, order[:3000]), _turned(_pick(train, order[3000:3600])), _turned(_pick(test, judged)))


def _small_digits(images: NDArray[np.generic], labels: NDArray[np.generic]) -> Samples:
    cropped = images[:, 2:26, 2:26].astype(np.float32) / 255
    small = cropped.reshape(-1, 8, 3, 8, 3).mean((2, 4))[:, None]
    return Samples(small.astype(np.float32), labels.astype(np.int64))


def _turned(samples: Samples) -> Samples:
    return Samples(np.ascontiguousarray(np.rot90(samples.inputs, 1, (2, 3))), samples.labels)


def keywords(seed: int) -> Split:
    """Return words over one microphone to pretrain on and over another to adapt to."""
    data = _load("kws_mfcc_1k.npz")
    features = data["features"].astype(np.float32).transpose(0, 2, 1)
    mean, deviation = features.mean((0, 2), keepdims=True), features.std((0, 2), keepdims=True)
    samples = Samples(((features - mean) / deviation).astype(np.float32), data["labels"].astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(samples.labels))
    response = np.random.default_rng(7).normal(0.0, 2.0, (1, 10, 1)).astype(np.float32)
    train, test = _pick(samples, order[500:800]), _pick(samples, order[800:])
    shift = [Samples(part.inputs + response, part.labels) for part in (train, test)]
    return Split(_pick(samples, order[:500]), shift[0], shift[1])


def gestures(seed: int) -> Split:
    """Return gestures with the board mounted one way to pretrain on and the other way to adapt to."""
    data = _load("wand_imu.npz")
    samples = Samples(gesture_windows(data["samples"], data["offsets"]), data["labels"].astype(np.int64))
    order = np.random.default_rng(seed).permutation(len(samples.labels))
    before, train, test = (_pick(samples, part) for part in np.split(order, [150, 250]))
    return Split(before, remounted(train), remounted(test))


def gesture_windows(stream: NDArray[np.generic], offsets: NDArray[np.generic], length: int = 64) -> FloatArray:
    """Return windows [N, 6, length] of accelerations in 20 m/s^2 and rates in 500 degrees/s, resampled linearly."""
    windows = []
    for start, stop in pairwise(offsets):
        window = stream[int(start) : int(stop)].astype(np.float32)
        at = np.linspace(0, len(window) - 1, length)
        columns = [np.interp(at, np.arange(len(window)), window[:, c]) for c in range(6)]
        windows.append(np.stack(columns) / np.array([20.0] * 3 + [500.0] * 3)[:, None])
    return np.stack(windows).astype(np.float32)


def remounted(samples: Samples) -> Samples:
    """Return the samples as a board turned about the diagonal of x and y measures them."""
    turned = samples.inputs[:, [1, 0, 2, 4, 3, 5]] * np.array([1, 1, -1, 1, 1, -1], np.float32)[None, :, None]
    return Samples(np.ascontiguousarray(turned), samples.labels)


def camera(seed: int) -> Split:
    """Return upright pictures to pretrain on and turned ones to adapt to."""
    return _drawn("cifar10_train4k_test1k.npz", seed, (2000, 400, 800), 80)


def mobilenet(seed: int) -> Split:
    """Return upright digits of three channels to pretrain on and turned ones to adapt to."""
    return _drawn("mnist_train9k_test10k.npz", seed, (2000, 300, 600), 96)


def _drawn(name: str, seed: int, counts: tuple[int, int, int], size: int) -> Split:
    data, (before, adapt, held_out) = _load(name), counts
    order = np.random.default_rng(seed).permutation(len(data["train_labels"]))
    judged = np.random.default_rng(seed + 1000).permutation(len(data["test_labels"]))[:held_out]

    def part(kind: str, at: NDArray[np.int64]) -> Samples:
        pixels = data[f"{kind}_images"][at].astype(np.float32) / 255
        colours = pixels.transpose(0, 3, 1, 2) if pixels.ndim == 4 else np.repeat(pixels[:, None], 3, 1)
        drawn = nn.functional.interpolate(torch.from_numpy(colours), (size, size), mode="bilinear")
        return Samples(drawn.numpy(), data[f"{kind}_labels"][at].astype(np.int64))

    return Split(
        part("train", order[:before]),
        _turned(part("train", order[before : before + adapt])),
        _turned(part("test", judged)),
    )


TASKS = (
    Task("digits", DigitsNet, digits, 8),
    Task("keywords", lambda: StreamNet(10, 12), keywords, 12),
    Task("gestures", lambda: StreamNet(6, 3), gestures, 12),
    Task("camera", CameraNet, camera, 4, 0.01),
    Task("mobilenet", MobileNetV2, mobilenet, 4, 0.003),
)


def pretrain(task: Task, before: Samples, seed: int) -> nn.Module:
    """Return the task's model trained on the first domain, in fp32 with Adam, in eval mode."""
    torch.manual_seed(seed)
    model = task.model().train()
    epochs = max(12, min(40, 20_000 // len(before.labels)))
    steps = epochs * -(-len(before.labels) // 32)
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    inputs, labels = torch.from_numpy(before.inputs), torch.from_numpy(before.labels)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()
