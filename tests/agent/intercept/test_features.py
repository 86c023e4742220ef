"""Small programs under `budget(tensors="4K")` leave the bits that plain PyTorch leaves: some of
`benchmarks.zoo --features`.
"""

import sys

import pytest

from benchmarks.follow_zoo import features
from benchmarks.follow_zoo.children import Case, run_in_children
from benchmarks.follow_zoo.compare import WRONG, Verdict

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="children are forked"), pytest.mark.process]

EVERY = [20, pytest.param(5, marks=pytest.mark.long)]
"""Of a subject's features, each so manieth runs."""
TIMEOUT_S = 120.0
ONCE_WRONG = frozenset({
    "autograd/jacobians", "autograd/hessian", "autograd/forward_mode", "autograd/exported_between_steps",
    "autograd/shapes_tried_on_fake_tensors", "autograd/graph_of_a_gradient", "tensors/storages_exchanged",
    "workers/pool_started_before_training", "workers/shared_with_a_process", "workers/timer_looks_at_weights",
    "workers/loader_with_workers", "saving/printed_while_training", "escapes/storage_copied",
})  # fmt: skip
"""Each of these failed or crashed when it was first run."""

SUBJECTS = sorted({name.partition("/")[0] for name in features.registered()})


def _chosen(subject: str, every: int) -> list[Case]:
    known = features.registered().items()
    own = [(n, p) for n, p in known if n.startswith(subject + "/") and n not in features.KNOWN_WRONG]
    chosen = {n: p for i, (n, p) in enumerate(own) if i % every == 0 or n in ONCE_WRONG}
    return [Case(n, p, ("4K", "4K around training")) for n, p in chosen.items()]


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_features_leave_the_same_bits(subject: str, every: int) -> None:
    outcomes = list(run_in_children(_chosen(subject, every), jobs=1, timeout_s=TIMEOUT_S))
    assert [o for o in outcomes if o.verdict in WRONG] == []
    assert any(o.verdict is Verdict.EQUAL for o in outcomes)
