"""What a board learnt survives a power cut, and comes back as the weights of the module."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from port_agent.cli import main
from port_agent.mcu.board.firmware import build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.project import Project, load_project
from port_agent.mcu.protocol.device import Device
from port_agent.mcu.protocol.session import Session
from port_agent.mcu.protocol.transport import SerialTransport
from port_planner.mcu import HostEngine
from port_planner.script_loading import imports_kept, load_script
from tests.agent.cli.mcu.command import run_json
from tests.agent.mcu.simulated_board import QUICK

pytestmark = pytest.mark.process

PROJECT = """
import numpy as np
import torch
from torch import nn

from port_agent.mcu.project import Project
from port_planner.mcu import compile_model


def make_module():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)]
    layers += [nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4, affine=False), nn.MaxPool2d(2), nn.Flatten()]
    module = nn.Sequential(*layers, nn.Linear(16, 2))
    module.train()(torch.randn(64, 1, 4, 4))
    return module.eval()


def make_project():
    y = np.arange(80) % 2
    x = np.random.default_rng(0).normal(size=(80, 1, 4, 4)).astype(np.float32)
    x[y == 1, :, :2] += 1
    settings = {"epochs": 3, "learning_rate": 0.02}
    return Project(compile_model(make_module(), x, name="bars"), x, y, x, y, classes=("low", "high"), settings=settings)
"""


NUMBERS = """
import numpy as np
import torch
from torch import nn

from port_agent.mcu.project import Project
from port_planner.mcu import Loss, compile_model


def make_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 6), nn.Tanh(), nn.Linear(6, 256)).eval()


def make_project():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(60, 3)) @ rng.normal(size=(3, 256))).reshape(60, 1, 16, 16).astype(np.float32) / 2
    y = x.reshape(60, 256)
    model = compile_model(make_module(), x, name="autoencoder", loss=Loss.MSE)
    return Project(model, x[:40], y[:40], x[40:], y[40:], settings={"epochs": 12})
"""
"""An autoencoder of images: 256 targets, so that a sample with them is longer than a request."""


@pytest.fixture(autouse=True)
def imports() -> Iterator[None]:
    """Leave the imports of the process as they were: each project that is loaded adds a layer to them."""
    with imports_kept():
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "project.py").write_text(PROJECT)
    return tmp_path / "project"


def weights_on(simulator: Simulator) -> bytes:
    session = Session(SerialTransport(str(simulator.port)), QUICK)
    parameters = Device(session).read_parameters()
    session.close()
    return parameters


def logits(project: Project, module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = module(torch.from_numpy(project.test_x))
    return found


def test_what_was_learnt_survives_power_off_and_is_the_modules(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    run_json(capsys, "compile", str(project), "-o", str(build))
    with Simulator(build_firmware("posix", build, tmp_path / "firmware"), tmp_path / "simulator") as simulator:
        port = ("--port", str(simulator.port))
        lines = run_json(capsys, "train", str(build), *port, "--out", str(tmp_path / "result.safetensors"))
        assert [line["saves"] for line in lines if line["event"] == "saved"] == [1]
        assert lines[-1]["accuracy_after"] > lines[-1]["accuracy_before"]
        learnt = weights_on(simulator)
        simulator.kill()
        simulator.start()
        assert weights_on(simulator) == learnt  # it booted from its own flash
        (evaluation,) = run_json(capsys, "eval", str(build), *port)
        assert evaluation["accuracy"] == lines[-1]["accuracy_after"]
        classes = run_json(capsys, "infer", str(build), "--data", str(build / "test.npz"), *port)
        assert {line["name"] for line in classes} == {"low", "high"} and len(classes) == 80
        sources: tuple[list[str], ...] = (
            [],
            ["--from-board", *port],
            ["--result", str(tmp_path / "result.safetensors")],
        )
        for number, source in enumerate(sources):
            run_json(capsys, "export", str(build), "-o", str(tmp_path / f"{number}.safetensors"), *source)
        run_json(capsys, "train", str(build), *port, "--lr", "20", "--keep-weights")  # forgets
        run_json(capsys, "export", str(build), "-o", str(tmp_path / "best.safetensors"), "--best")
        run_json(capsys, "export", str(build), "-o", str(tmp_path / "last.safetensors"))
    best, last, first = ((tmp_path / f"{name}.safetensors").read_bytes() for name in ("best", "last", "0"))
    assert best == first != last  # where the second training began is the best it has seen
    files = [(tmp_path / f"{number}.safetensors").read_bytes() for number in range(len(sources))]
    assert files[0] == files[1] == files[2]

    module = load_script(project / "project.py").make_module()
    given = load_project(project)
    before = logits(given, module)
    module.load_state_dict(load_file(tmp_path / "0.safetensors"))
    after = logits(given, module)
    right = (after.argmax(1).numpy() == given.test_y).mean()
    assert right == pytest.approx(evaluation["accuracy"], abs=0.05) and not torch.allclose(before, after)
    assert np.mean([line["class"] for line in classes] == after.argmax(1).numpy()) > 0.9

    run_json(capsys, "export", str(build), "-o", str(tmp_path / "codes.safetensors"), "--codes", "--best")
    for weights in ("0", "codes"):
        again = tmp_path / f"again_{weights}"
        words = ("compile", str(project), "-o", str(again), "--weights", str(tmp_path / f"{weights}.safetensors"))
        run_json(capsys, *words)
        with Simulator(
            build_firmware("posix", again, tmp_path / "firmware"), tmp_path / f"with_{weights}"
        ) as simulator:
            assert weights_on(simulator) == learnt  # to the bit
    (small,) = run_json(capsys, *words, "--inference")
    assert small["parameter_bytes"] == 0
    with Simulator(build_firmware("posix", again, tmp_path / "firmware"), tmp_path / "small") as simulator:
        port = ("--port", str(simulator.port))
        assert run_json(capsys, "infer", str(again), "--data", str(build / "test.npz"), *port) == classes


def test_weights_of_something_else_are_refused(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build = tmp_path / "build"
    run_json(capsys, "compile", str(project), "-o", str(build))
    assert main(["mcu", "export", str(build), "-o", str(tmp_path / "w.safetensors")]) == 2
    assert "no training in" in capsys.readouterr().err
    np.savez(tmp_path / "w.npz", x=np.zeros(3))
    assert main(["mcu", "export", str(build), "-o", str(tmp_path / "w"), "--result", str(tmp_path / "w.npz")]) == 2
    assert "give the file that mcu train --out" in capsys.readouterr().err
    assert main(["mcu", "compile", str(project), "-o", str(build), "--weights", str(tmp_path / "w.npz")]) == 2
    assert "give a .safetensors file of mcu export" in capsys.readouterr().err
    assert main(["mcu", "compile", str(project), "-o", str(build), "--inference", "--q88"]) == 2
    assert "--inference trains nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_numbers_are_learnt_answered_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "project.py").write_text(NUMBERS)
    build = tmp_path / "build"
    (compiled,) = run_json(capsys, "compile", str(tmp_path), "--choose-rate")
    rates = compiled["learning_rate"]
    assert rates["chosen"] == max(rates["measured"], key=lambda each: each["accuracy"])["rate"]
    with Simulator(build_firmware("posix", build, tmp_path / "firmware"), tmp_path / "simulator") as simulator:
        where = (str(build), "--port", str(simulator.port))
        lines = run_json(capsys, "train", *where)
        assert lines[-1]["explains"] and lines[-1]["accuracy_after"] > 0.5 > lines[-1]["accuracy_before"]
        (judged,) = run_json(capsys, "eval", *where)
        assert judged["accuracy"] == lines[-1]["accuracy_after"]
        assert main(["mcu", "eval", *where]) == 0 and "of the targets' variance" in capsys.readouterr().out
        np.savez(tmp_path / "new.npz", x=load_project(tmp_path).test_x)
        found = run_json(capsys, "infer", *where, "--data", str(tmp_path / "new.npz"))
        learnt = weights_on(simulator)
    exported = tmp_path / "learnt.safetensors"
    run_json(capsys, "export", str(build), "-o", str(exported))
    project = load_project(tmp_path)
    module = load_script(tmp_path / "project.py").make_module()
    module.load_state_dict(load_file(exported))
    with torch.no_grad():
        wanted = module(torch.from_numpy(project.test_x)).numpy()
    outputs = np.array([each["outputs"] for each in found], np.float32)
    assert np.mean((outputs - wanted) ** 2) < 0.01 * np.mean((outputs - project.test_y) ** 2)
    engine = HostEngine(project.model)
    engine.parameters = learnt
    for row, answer in zip(project.model.quantize_input(project.test_x), outputs, strict=True):
        assert (engine.infer(row)[1] == answer).all()


def test_targets_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "project.py"
    script.write_text(NUMBERS.replace("y[:40], x[40:]", "y[:40, 1:], x[40:]"))
    assert main(["mcu", "compile", str(tmp_path)]) == 1
    assert "give 256 real numbers for each sample" in capsys.readouterr().err
    script.write_text(NUMBERS.replace(", loss=Loss.MSE", ""))
    assert main(["mcu", "compile", str(tmp_path)]) != 0
    assert "compile it with loss=Loss.MSE to learn numbers" in capsys.readouterr().err
    script.write_text(NUMBERS.replace("nn.Linear(6, 256)", "nn.Linear(6, 256), nn.Softmax(1)"))
    assert main(["mcu", "compile", str(tmp_path)]) != 0
    assert "no kernel for Softmax" in capsys.readouterr().err
