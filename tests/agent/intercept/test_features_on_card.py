"""Programs on the simulated card, within half of what they take and with nothing resident but operands, beside
themselves without a budget.
"""

import json
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks.follow_zoo.compare import WRONG, Outcome, Verdict
from tests.simulated_card import library, missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.process, pytest.mark.slow]

SAMPLES = [
    ("features", "40", "7"),
    *(pytest.param(("features", "8", str(first)), marks=pytest.mark.long) for first in range(8)),
    pytest.param(("programs", "30", "0"), marks=pytest.mark.long),
    pytest.param(("zoo", "60", "0"), marks=pytest.mark.long),
]
"""Each so manieth program of a kind, from one on; of processes of its own, as what a device is asked for
first lasts as long as they.
"""


@pytest.mark.parametrize("sample", SAMPLES)
def test_programs_leave_the_same_bits(sample: tuple[str, str, str]) -> None:
    library()
    words = [sys.executable, "-m", "tests.card_cases", *sample]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = [Outcome.from_json(json.loads(line)) for line in done.stdout.splitlines()]
    assert [o for o in outcomes if o.verdict in WRONG] == []
    counted = Counter(o.verdict for o in outcomes)
    assert counted[Verdict.EQUAL] > len(outcomes) / 2 and sum(o.written_bytes for o in outcomes) > 0, counted
