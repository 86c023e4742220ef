"""Typed answers become the JSON of version 1."""

import json

from tests.agent.control.examples import status


def test_a_status_is_the_json_of_version_1() -> None:
    plain = json.loads(json.dumps(status().as_json()))
    assert plain["v"] == 1
    assert plain["facts"]["voices"] == [{"name": "load", "idle": "yes", "detail": "others use 2 % CPU"}]
    assert plain["job"]["wish"] == "train" and "requested" not in plain["job"]
    assert plain["health"][0]["severity"] == "error" and plain["health"][0]["since"] == 2.0
