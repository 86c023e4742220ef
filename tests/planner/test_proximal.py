"""A job with FedProx's term trains as plain PyTorch with the term in its loss does, from the
bundle's weights or given ones.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from port_agent.training.trainer import Trainer
from port_planner.ir.bundle.bundle import Bundle, read_manifest
from port_planner.ir.bundle.manifest import PROXIMAL_FORMAT
from port_planner.job import JobError, TrainingJob
from port_planner.job_checks import checked_samples
from port_planner.plain_steps import plain_losses
from port_planner.proximal import with_proximal_term
from tests.agent.jobs_small import classify, write_job
from tests.agent.training.options import train_options

MU, STEPS = 3.0, 6


def job(**settings: float) -> TrainingJob:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    model.get_parameter("0.bias").requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = (torch.randn(24, 6), torch.randint(0, 3, (24,)))
    settings = {"proximal_mu": MU, **settings}
    return TrainingJob(model, classify, torch.optim.SGD(trained, lr=0.1, momentum=0.9), data, 4, **settings)  # type: ignore[arg-type]


def by_hand(begin: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Return what plain PyTorch makes of the job's steps with the term's formula, from these weights."""
    made = job()
    if begin is not None:
        made.model.load_state_dict(begin, strict=False)
    start = [parameter.detach().clone() for parameter in made.model.parameters()]

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, right = classify(model, x, y)
        for parameter, kept in zip(model.parameters(), start, strict=True):
            if parameter.requires_grad:
                value = value + MU / 2 * (parameter - kept).square().sum()
        return value, right

    made.proximal_mu, made.loss_fn = None, loss
    list(plain_losses(made, made.data, STEPS))
    return made.model.state_dict()


def trained(bundle: Path, folder: Path, weights: Path | None) -> dict[str, torch.Tensor]:
    folder.mkdir()
    trainer = Trainer(Bundle(bundle), train_options(folder, folder, steps=STEPS, weights=weights))
    trainer.start()
    trainer.train(lambda _: None, lambda *_: None)
    trainer.save_weights(folder / "out.safetensors")
    trainer.close()
    return load_file(folder / "out.safetensors")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("proximal") / "job.port"
    write_job(path, job(), seeds=(0,), ram_bytes=1 << 30)
    return path


@pytest.mark.parametrize("given", [False, True])
def test_weights_are_held_near_those_that_the_run_began_with(tmp_path: Path, bundle: Path, given: bool) -> None:
    begin = None
    if given:
        state = job().model.state_dict()
        begin = {name: tensor + 0.5 for name, tensor in state.items() if tensor.is_floating_point()}
        save_file(begin, tmp_path / "begin.safetensors")
    found, expected = (
        trained(bundle, tmp_path / "run", tmp_path / "begin.safetensors" if given else None),
        by_hand(begin),
    )
    assert found.keys() == expected.keys(), "where it began is not in the result"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_older_agents_refuse_such_a_bundle(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert manifest.format == PROXIMAL_FORMAT and manifest.proximal is not None
    assert sorted(manifest.proximal.starts.values()) == ["0.weight", "1.bias", "1.weight", "3.bias", "3.weight"]


@pytest.mark.parametrize("mu", [0.0, -1.0, float("nan"), float("inf"), True])
def test_a_factor_that_is_none_is_refused(mu: float) -> None:
    with pytest.raises(JobError, match="proximal_mu is"):
        checked_samples(job(proximal_mu=mu))


def test_accumulated_batches_share_one_term() -> None:
    made = job(proximal_mu=MU, accumulate=4)
    loss: Callable[..., tuple[torch.Tensor, ...]] = made.loss_of(0)
    with torch.no_grad():
        made.model.get_parameter("0.weight").add_(1.0)
    rows = [column[:4] for column in made.data]
    added = loss(made.model, *rows)[0] - made.loss_fn(made.model, *rows)[0]
    assert torch.allclose(4 * added, torch.tensor(MU / 2 * 30))
    alone = with_proximal_term(lambda model, *batch: made.loss_fn(model, *batch)[0], MU)
    assert isinstance(alone(made.model, *rows), torch.Tensor)
