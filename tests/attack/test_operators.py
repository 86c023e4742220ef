"""No operator that a bundle may name reads or writes out of bounds, whatever it is called with."""

from collections import Counter

import pytest

from tests.attack.operators import attack_operators, attempt, right_calls
from tests.attack.outcome import Survived

TRUSTING = (
    "nn.functional.max_pool2d", "nn.functional.max_pool3d", "nn.functional.adaptive_max_pool2d", "nn.functional.nll_loss",
    "nn.functional.embedding", "nn.functional.batch_norm", "nn.functional.layer_norm", "log_softmax",
    "nn.functional.avg_pool2d", "nn.functional.adaptive_avg_pool2d", "nn.functional.grid_sample", "nn.functional.interpolate",
    "unfold", "nn.functional.gelu", "nn.functional.embedding_bag", "cdist", "nn.functional.pdist", "nn.functional.adaptive_max_pool3d",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss", "grid_sampler_3d", "_upsample_bilinear2d_aa",
)  # fmt: skip
"""Functions of torch whose operators crashed before they were checked."""


@pytest.mark.slow
def test_calls_that_are_right_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The valid samples pass; otherwise their hostile variants would be refused for the wrong reason."""
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")  # torch's tests load setuptools, which wants to be first
    calls = right_calls(("nn.functional.embedding", "cdist"))
    ended = Counter(attempt(call) for call in calls)
    assert ended["ran"] >= 0.9 * len(calls) > 0, ended


def test_operators_that_trust_their_callers(survived: Survived) -> None:
    outcome = attack_operators(seed=1, count=2000, functions=TRUSTING)
    survived(outcome)
    assert outcome.tried == outcome.clean == 2000
    assert all(words in outcome.notes for words in ("ran", "refused when loaded", "refused by torch")), outcome.notes


@pytest.mark.long
def test_every_operator(survived: Survived) -> None:
    outcome = attack_operators(seed=2, count=200_000)
    survived(outcome)
