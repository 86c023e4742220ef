"""What is kept of an evaluation is of one training and one state of its weights, or it is not taken."""

import math
from pathlib import Path

import pytest

from port_agent.finetuning.evaluation import HeldOutLosses, perplexity

LOSSES = [0.1, math.inf, 2.5e-7]


def test_the_same_bits_come_back_for_the_same_weights_alone(tmp_path: Path) -> None:
    kept = HeldOutLosses(tmp_path / "state" / "kept", "this")
    assert kept.read(3) == []
    kept.write(3, LOSSES)
    assert kept.read(3) == LOSSES
    assert kept.read(4) == [] and HeldOutLosses(tmp_path / "state" / "kept", "other").read(3) == []
    kept.write(4, LOSSES[:1])
    assert kept.read(4) == LOSSES[:1] and kept.read(3) == []
    kept.remove()
    kept.remove()
    assert kept.read(4) == []


@pytest.mark.slow
def test_no_flipped_bit_and_no_cut_is_taken_for_a_loss(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kept = HeldOutLosses(path, "this")
    kept.write(3, LOSSES)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert kept.read(3) == []
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert kept.read(3) == []


def test_a_loss_beyond_all_numbers_has_a_perplexity() -> None:
    assert perplexity(0.0) == 1.0 and perplexity(1e4) == math.inf and math.isnan(perplexity(math.nan))
