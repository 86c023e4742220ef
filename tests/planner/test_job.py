"""What the user's own code raises is told with its own lines; what this program raises passes."""

import json

import pytest

from planner.job import JobError, ScriptError, own_code


def test_what_the_users_code_raises() -> None:
    with pytest.raises(ScriptError) as caught, own_code("reading the data"):
        json.loads("{")
    message = str(caught.value)
    assert message.startswith("reading the data failed; mend it and run the command again:")
    assert 'json.loads("{")' in message and "JSONDecodeError" in message
    assert "decoder.py" not in message and caught.value.exit_code == 2


def test_what_is_said_already_passes() -> None:
    with pytest.raises(JobError, match=r"^said$"), own_code("anything"):
        raise JobError("said")
