"""What is asked of a federation is checked where it comes in."""

import msgspec
import pytest

from port_agent.federate.orders import FederationSettings, RoundOrder


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"min_share": 0.0}, {"min_share": 1.5}, {"timeout_s": -1.0}, {"clip": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"rounds": 3, **wrong}, FederationSettings)


def test_an_order_comes_as_it_went() -> None:
    order = RoundOrder(
        run_id=7,
        number=1,
        folder="/f",
        bundle="/b",
        names={5: "attic"},
        goal=1,
        timeout_s=1.0,
        min_share=0.5,
        secure=True,
    )
    assert msgspec.json.decode(msgspec.json.encode(order), type=RoundOrder) == order
    assert order.nodes == (5,)
