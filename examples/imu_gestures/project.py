"""A gesture recogniser for a motion sensor, adapted on the board to the way it is mounted.

The net learns three gestures with the sensor as its makers held it. Then the board is screwed on upside down and turned
by 90 degrees: nothing is recognised any more, until the board has trained itself on a few dozen gestures made with it.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from port_agent.mcu.project import Project
from port_planner.mcu.autodiff import last_layers
from port_planner.mcu.compile import compile_model
from port_planner.mcu.frontend import import_module
from port_planner.mcu.zoo import StreamNet

DATA = Path(__file__).with_name("gestures.npz")
SCALES = np.array([10, 10, 10, 4, 4, 4], np.float32)
"""m/s2 and rad/s that become about one."""
FACTORY_SHARE, ADAPT_SHARE = 0.5, 0.25
PRETRAIN_EPOCHS = 40
TRAINED_LAYERS = 4

Array = NDArray[np.float32]


def load() -> tuple[Array, NDArray[np.int64], tuple[str, ...]]:
    """Return gestures [352, 6, 64], their classes and the names of the classes."""
    with np.load(DATA, allow_pickle=False) as archive:
        x = archive["x"].astype(np.float32) / SCALES[:, None]
        return x, archive["y"].astype(np.int64), tuple(str(name) for name in archive["classes"])


def remount(x: Array) -> Array:
    """Return what the sensor sees upside down and turned by 90 degrees: (x, y, z) becomes (y, x, -z), twice."""
    return np.ascontiguousarray(x[:, [1, 0, 2, 4, 3, 5]] * np.array([1, 1, -1, 1, 1, -1], np.float32)[:, None])


def pretrain(x: Array, y: NDArray[np.int64], classes: int) -> StreamNet:
    """Return the net as it leaves the factory."""
    torch.manual_seed(1)
    net = StreamNet(x.shape[1], classes)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(PRETRAIN_EPOCHS):
        for batch in torch.randperm(len(y)).split(32):
            loss = torch.nn.functional.cross_entropy(net(inputs[batch]), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return net.eval()


def make_project() -> Project:
    """Return the compiled recogniser, and gestures made with the remounted board to adapt to and to test on."""
    x, y, classes = load()
    order = np.random.default_rng(2).permutation(len(y))
    factory, rest = np.split(order, [int(FACTORY_SHARE * len(y))])
    adapt, test = np.split(rest, [int(ADAPT_SHARE * len(y))])
    net = pretrain(x[factory], y[factory], len(classes))
    turned = remount(x)
    calibration = np.concatenate([x[factory], turned[factory]])
    scheme = last_layers(import_module(net, x.shape[1:]), TRAINED_LAYERS)
    return Project(
        model=compile_model(net, calibration, name="imu_gestures", scheme=scheme),
        train_x=turned[adapt],
        train_y=y[adapt],
        test_x=turned[test],
        test_y=y[test],
        classes=classes,
        settings={"epochs": 20, "learning_rate": 0.01, "snapshot_every": 500, "evaluate_every": 5},
        note=f"three gestures, {len(factory)} of them seen at the factory; the board is now mounted upside down and "
        f"turned: it trains on {len(adapt)} new gestures and is tested on {len(test)} others",
    )
