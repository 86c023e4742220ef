"""What is asked for reaches the process that trains as it was asked."""

import msgspec
import pytest

from port_agent.finetuning.inputs.options import FinetuneError, FinetuneOptions
from port_planner.base.errors import ExitCode, PortError


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": None, "sample": 'a "word"'}, {"targets": ("a", "b"), "updates": 3}]
)
def test_they_are_the_same_on_the_other_side(changes: dict[str, object]) -> None:
    options = FinetuneOptions("model", ("data",), "out", **changes)  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(options), type=FinetuneOptions) == options


def test_what_cannot_be_trained_with_is_the_users_to_mend() -> None:
    assert issubclass(FinetuneError, PortError) and FinetuneError.exit_code == ExitCode.IMPOSSIBLE
