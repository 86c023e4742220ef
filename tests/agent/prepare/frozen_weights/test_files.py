"""A bundle leaves frozen weights in the safetensors file they were loaded from; a file that
changed is refused by name.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from port_agent.prepare.frozen_weights.files import with_weight_files
from port_agent.prepare.measurement.dry_run import DryRunWorkers
from port_agent.prepare.measurement.within_budget import within_budget
from port_agent.prepare.reference import with_expected_results
from port_agent.training.trainer import Trainer
from port_planner import make_bundle
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.manifest import FILES_FORMAT, BundleError
from port_planner.ir.costs import DeviceCosts, Flash, OpCost
from port_planner.job import TrainingJob
from port_planner.profiling.operator_profile import MeasuredCosts
from tests.agent.training.options import train_options
from tests.planner.bundles import read_everything, rewrite

WIDTH, ROWS = 256, 4
DEVICE = DeviceCosts("test", 0, 1.0, 1.0, Flash("flash", 500e6, 500e6, 1e-4, 1e-9, 1e-9))
FROZEN = {"parameter/base.0.weight", "parameter/base.2.weight"}


class Adapted(nn.Module):
    """Frozen layers, and an adapter that is trained."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.base.load_state_dict(load_file(weights), assign=True)
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    path = tmp_path_factory.mktemp("weights") / "base.safetensors"
    save_file(layers.state_dict(), path)
    return path


def made(weights: Path, out: Path, change: Callable[[nn.Module], object] = lambda model: None) -> Bundle:
    torch.manual_seed(1)
    model = Adapted(weights)
    change(model)
    loss = lambda model, x, y: functional.mse_loss(model(x), y)  # noqa: E731
    optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()])
    data = [torch.randn(3 * ROWS, WIDTH), torch.randn(3 * ROWS, WIDTH)]
    captured = make_bundle.prepare(TrainingJob(model, loss, optimizer, data, ROWS))
    captured = with_expected_results(with_weight_files(captured), 2)
    measured = MeasuredCosts(tuple(tuple(OpCost(1e-4, 0, 1e-4) for _ in g.ops) for g in captured.graphs.values()), 0, 0)
    planner = make_bundle.default_planner(strategy="greedy", time_limit_s=1.0)
    plans, costs = make_bundle.plan_all(captured, measured, DEVICE, 1 << 30, planner)
    make_bundle.write(out, captured, [plans], costs, [1 << 30], threads=torch.get_num_threads())
    return Bundle(out)


@pytest.mark.process
@pytest.mark.usefixtures("torch_forks")
def test_the_bundle_names_them_and_trains_the_same(weights: Path, tmp_path: Path) -> None:
    bundle = made(weights, tmp_path / "job.port")
    assert set(bundle.manifest.files) == FROZEN and bundle.manifest.format == FILES_FORMAT
    assert bundle.path.stat().st_size < WIDTH * WIDTH * 4
    stored = load_file(weights)
    for key in FROZEN:
        name = key.partition(".")[2]
        assert b"".join(bundle.contents(key, 1 << 16)) == stored[name].numpy().tobytes()
    DryRunWorkers(bundle.manifest.threads).dry_run(bundle.path, (tmp_path,), compared=2)


@pytest.mark.slow
def test_so_it_does_where_planning_keeps_to_a_budget(weights: Path, tmp_path: Path) -> None:
    with within_budget(1 << 30, tmp_path):
        bundle = made(weights, tmp_path / "job.port")
    assert set(bundle.manifest.files) == FROZEN
    read_everything(bundle)


def test_what_was_changed_in_memory_goes_into_the_bundle(weights: Path, tmp_path: Path) -> None:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("base.0.weight").mul_(2)

    bundle = made(weights, tmp_path / "job.port", change)
    assert set(bundle.manifest.files) == FROZEN - {"parameter/base.0.weight"}
    read_everything(bundle)


@pytest.mark.slow
def test_a_file_that_changed_or_is_away_is_refused_by_name(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    bundle = made(copy, tmp_path / "job.port")
    part = bundle.manifest.files["parameter/base.2.weight"]
    with copy.open("r+b") as stream:
        stream.seek(part.offset + 5)
        stream.write(b"\x7f")
    with pytest.raises(
        BundleError,
        match=r"copy\.safetensors has changed since the bundle was created: the checksum of parameter/base\.2\.weight",
    ):
        read_everything(bundle)
    copy.write_bytes(weights.read_bytes()[: part.offset])
    with pytest.raises(BundleError, match=r"copy\.safetensors ends before parameter/"):
        read_everything(bundle)
    copy.unlink()
    with pytest.raises(BundleError, match=r"copy\.safetensors, which has parameter/base.*No such file"):
        read_everything(bundle)


@pytest.mark.slow
def test_a_job_goes_on_from_the_file_itself_and_not_where_it_changed_meanwhile(weights: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(weights.read_bytes())
    bundle, state = made(copy, tmp_path / "job.port"), tmp_path / "state"

    def trained(steps: int) -> list[float]:
        trainer, losses = Trainer(bundle, train_options(state, tmp_path, steps=steps, verify=2)), list[float]()
        try:
            trainer.start()
            trainer.train(lambda event: losses.append(event.loss), lambda *_: None)
            trainer.commit(lambda *_: None)
        finally:
            trainer.close()
        return losses

    assert len(trained(1)) == 1 and len(trained(2)) == 1
    assert (state / "state.pages").stat().st_size < WIDTH * WIDTH * 4
    part = bundle.manifest.files["parameter/base.2.weight"]
    with copy.open("r+b") as stream:
        stream.seek(part.offset + 5)
        stream.write(b"\x7f")
    with pytest.raises(BundleError, match=r"copy\.safetensors was changed since the bundle was made; restore"):
        trained(3)
    copy.write_bytes(weights.read_bytes())
    assert len(trained(3)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("named", ["/etc/passwd", "/dev/zero", "job.port", "relative.safetensors"])
def test_a_bundle_gets_at_no_other_files(weights: Path, tmp_path: Path, named: str) -> None:
    made(weights, tmp_path / "job.port")
    path = str(tmp_path / named) if named == "job.port" else named

    def change(manifest: dict[str, object]) -> dict[str, object]:
        files = manifest["files"]
        assert isinstance(files, dict)
        for part in files.values():
            part.update(path=path, offset=0, nbytes=WIDTH * WIDTH * 4)
        return manifest

    rewrite(tmp_path / "job.port", tmp_path / "other.port", {"manifest.json": change})
    with pytest.raises(BundleError, match=r"is not a valid file of weights|is not a path within the bundle"):
        read_everything(Bundle(tmp_path / "other.port"))
