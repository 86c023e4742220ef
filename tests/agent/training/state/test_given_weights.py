"""A run that begins with given weights is the run of a bundle that has them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from port_agent.training.state.given_weights import GivenWeights, GivenWeightsError
from port_agent.training.state.resident_state import initial_contents
from port_agent.training.trainer import Trainer
from port_planner.ir.bundle.bundle import Bundle
from tests.agent.jobs_small import make_job, small_bundle, write_job
from tests.agent.training.options import train_options
from tests.planner.own_optimizers import ScheduleFree


def filled(bundle: Bundle, weights: Path, key: str) -> bytes:
    nbytes = next(s.nbytes for g in bundle.graphs.values() for s in g.storages if s.key == key)
    given = GivenWeights(bundle, weights).contents(key, initial_contents(bundle, key, nbytes))
    return b"".join(bytes(chunk.numpy()) for chunk in given)


def test_given_tensors_take_the_place_of_the_bundles_and_others_stay(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    layouts = bundle.manifest.layouts
    name = next(n for n in bundle.manifest.result if layouts.get(bundle.result_key(n), None) is not None)
    key = bundle.result_key(name)
    tensor = torch.arange(1.0, 1.0 + torch.Size(layouts[key].shape).numel()).reshape(layouts[key].shape)
    save_file({name: tensor}, tmp_path / "given.safetensors")
    assert filled(bundle, tmp_path / "given.safetensors", key) == tensor.numpy().tobytes()
    other = next(k for k in layouts if k != key and k not in bundle.manifest.fills)
    plain = b"".join(bundle.contents(other, 1 << 20))
    assert filled(bundle, tmp_path / "given.safetensors", other) == plain


@pytest.mark.slow
def test_copies_of_the_bundles_own_weights_are_not_trained_beside_others(tmp_path: Path) -> None:
    job = make_job()
    write_job(tmp_path / "job.port", replace(job, optimizer=ScheduleFree(job.model.parameters()), scheduler=None))
    bundle = Bundle(tmp_path / "job.port")
    GivenWeights(bundle, None)
    with pytest.raises(GivenWeightsError, match=r"keeps .*/(mean|z) as a copy of the weights .* plan the job again"):
        GivenWeights(bundle, tmp_path / "given.safetensors")


def test_other_weights_are_refused_by_name(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    name = next(n for n in bundle.manifest.result if bundle.result_key(n) in bundle.manifest.layouts)
    for tensors, message in (
        ({"stranger": torch.zeros(2)}, "has 'stranger', which this bundle does not train"),
        ({name: torch.zeros(1, 1, 7)}, rf"{name} is float32\[1, 1, 7\]"),
    ):
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises(GivenWeightsError, match=message):
            GivenWeights(bundle, tmp_path / "w.safetensors")
    (tmp_path / "junk").write_bytes(b"\xff" * 40)
    with pytest.raises(GivenWeightsError, match="holds no weights"):
        GivenWeights(bundle, tmp_path / "junk")
    assert load_file(tmp_path / "w.safetensors")


def test_a_round_of_a_federation_goes_on_in_the_data_where_the_rounds_before_ended(tmp_path: Path) -> None:
    bundle = Bundle(small_bundle())
    name = next(n for n in bundle.manifest.result if bundle.result_key(n) in bundle.manifest.layouts)
    shape = bundle.manifest.layouts[bundle.result_key(name)].shape
    save_file({name: torch.ones(shape)}, tmp_path / "given.safetensors")

    def rows(steps: int, round_: int, weights: Path | None) -> list[list[torch.Tensor]]:
        state = tmp_path / f"{steps}-{round_}-{weights is None}"
        state.mkdir()
        t = Trainer(bundle, train_options(state, state, steps=steps, round=round_, weights=weights))
        seen = list[list[torch.Tensor]]()
        batch = t.samples.batch
        t.samples.batch = lambda *words: seen.append(batch(*words)) or seen[-1]  # type: ignore[method-assign]
        t.start()
        drawn.append(torch.rand(4))
        t.train(lambda _: None, lambda *_: None)
        t.close()
        return seen

    drawn: list[torch.Tensor] = []
    given = tmp_path / "given.safetensors"
    whole, first, second = rows(4, 0, given), rows(2, 0, given), rows(2, 1, given)
    assert all(
        torch.equal(one, other)
        for a, b in zip(whole, first + second, strict=True)
        for one, other in zip(a, b, strict=True)
    )
    assert not all(map(torch.equal, first[0], second[0]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2]), "the rounds' dropout"
