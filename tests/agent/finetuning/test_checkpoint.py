"""A checkpoint belongs to its settings and data, and a damaged one is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from port_agent.finetuning.base_record import BaseRecord
from port_agent.finetuning.checkpoint import Checkpoint, FinetuneProgress
from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_agent.finetuning.inputs.run_date import date_of_run
from port_planner.exactness.applied_arithmetic import unchanged_arithmetic

BASE = BaseRecord("model", None, {})


@pytest.fixture
def encoded(tmp_path: Path) -> FinetuneOptions:
    return FinetuneOptions("model", ("data",), str(tmp_path / "out"))


def test_it_puts_everything_back(encoded: FinetuneOptions) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    kept, kept_generator = weight.detach().clone(), torch.get_rng_state()
    checkpoint = Checkpoint(encoded, [1], BASE)
    checkpoint.write(FinetuneProgress(7, 2.5), [weight], {"optimizer": optimizer}, (kept_generator,))
    optimizer.step()
    torch.rand(3)
    assert checkpoint.read([weight], {"optimizer": optimizer}) == FinetuneProgress(7, 2.5)
    assert torch.equal(weight, kept) and optimizer.state[weight]["step"] == 1
    assert torch.equal(torch.get_rng_state(), kept_generator)
    checkpoint.remove()
    assert checkpoint.read([weight], {}) is None and not checkpoint.path.parent.exists()


def test_torchs_arithmetic_is_that_of_the_updates_before(encoded: FinetuneOptions) -> None:
    onednn = torch.backends.mkldnn
    checkpoint = Checkpoint(encoded, [1], BASE)
    with unchanged_arithmetic():
        onednn.enabled = False  # type: ignore[assignment]  # as a product leaves it that oneDNN refuses
        checkpoint.write(FinetuneProgress(1, None), [], {}, (torch.get_rng_state(),))
    with unchanged_arithmetic():
        assert onednn.enabled and checkpoint.read([], {}) is not None
        assert not onednn.enabled


def test_what_it_is_of_does_not_depend_on_how_it_is_shown(encoded: FinetuneOptions) -> None:
    Checkpoint(encoded, [1], BASE).write(FinetuneProgress(1, None), [], {}, (torch.get_rng_state(),))
    shown = replace(encoded, json=True, sample="words", show_data=9, date="2025-03-09")
    assert Checkpoint(shown, [1], BASE).read([], {}) == FinetuneProgress(1, None)
    for other in (Checkpoint(encoded, [2], BASE), Checkpoint(replace(encoded, seed=1), [1], BASE)):
        with pytest.raises(
            FinetuneError, match=r"belongs to other settings or other data; give another --out, or remove it"
        ):
            other.read([], {})


def test_a_damaged_one_is_refused(encoded: FinetuneOptions) -> None:
    checkpoint = Checkpoint(encoded, [], BASE)
    checkpoint.write(FinetuneProgress(1, None), [torch.ones(9)], {}, (torch.get_rng_state(),))
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:100])
    with pytest.raises(FinetuneError, match=r"is damaged .* remove it to start again"):
        checkpoint.read([torch.ones(9)], {})


def test_the_date_of_the_run_is_kept_with_it(encoded: FinetuneOptions) -> None:
    checkpoint = Checkpoint(replace(encoded, date="2025-03-09"), [1], BASE)
    checkpoint.write(FinetuneProgress(1, None), [], {}, (torch.get_rng_state(),))
    assert date_of_run(Path(encoded.out)) == "2025-03-09"
    checkpoint.remove()
    assert not checkpoint.path.parent.exists()


@pytest.mark.slow
def test_no_flipped_bit_goes_unseen(encoded: FinetuneOptions) -> None:
    checkpoint = Checkpoint(encoded, [], BASE)
    checkpoint.write(FinetuneProgress(3, 2.5), [torch.ones(9)], {}, (torch.get_rng_state(),))
    content = checkpoint.path.read_bytes()
    refused = 0
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        checkpoint.path.write_bytes(flipped)
        weight = torch.zeros(9)
        try:
            progress = checkpoint.read([weight], {})
        except FinetuneError:
            refused += 1
            continue
        assert progress == FinetuneProgress(3, 2.5) and torch.equal(weight, torch.ones(9)), place
    assert refused > len(content) // 12


def test_it_is_refused_with_other_held_out_text_and_losses_of_other_weights_are_not_taken(
    encoded: FinetuneOptions, tmp_path: Path
) -> None:
    kept = Checkpoint(encoded, [1], BASE, held_out=[2])
    kept.write(FinetuneProgress(1, 2.5), [], {}, (torch.get_rng_state(),))
    assert Checkpoint(encoded, [1], BASE, held_out=[2]).read([], {}) == FinetuneProgress(1, 2.5)
    with pytest.raises(FinetuneError, match="belongs to other held-out text"):
        Checkpoint(encoded, [1], BASE, held_out=[3]).read([], {})
    kept.losses.write(0, [2.5])
    assert Checkpoint(encoded, [1], BASE, held_out=[2]).losses.read(0) == [2.5]
    other_base = BaseRecord("model", None, {"model.safetensors": "other"})
    for other in (Checkpoint(encoded, [1], BASE, held_out=[3]), Checkpoint(encoded, [1], other_base, held_out=[2])):
        assert other.losses.read(0) == []
    adapter = tmp_path / "earlier" / "adapter_model.safetensors"
    adapter.parent.mkdir()
    further = replace(encoded, begin_from=str(adapter.parent))
    adapter.write_bytes(b"one")
    Checkpoint(further, [1], BASE).losses.write(0, [2.5])
    adapter.write_bytes(b"another")
    assert Checkpoint(further, [1], BASE).losses.read(0) == []
