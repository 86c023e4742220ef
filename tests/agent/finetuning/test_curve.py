"""The course of a fine-tuning: the best evaluation, when it is over, and what is written of it."""

from port_agent.finetuning.curve import Curve, CurvePoint, bars


def curve(*losses: float) -> Curve:
    return Curve([3.0, 2.0], [CurvePoint(2 * place, loss) for place, loss in enumerate(losses)])


def test_the_best_is_the_first_of_the_lowest() -> None:
    assert Curve().best is None and curve(3.0, 1.0, 1.0, 2.0).best == CurvePoint(2, 1.0)
    assert curve(1.0, 3.0, 2.0).best == CurvePoint(0, 1.0) and curve(1.0, 3.0, 2.0).best_trained == CurvePoint(4, 2.0)
    assert curve(3.0).best_trained is None
    assert curve(3.0, 1.0).at(2) == CurvePoint(2, 1.0) and curve(3.0).at(1) is None


def test_it_is_over_where_nothing_gets_better() -> None:
    assert not Curve().is_over(1) and not curve(3.0, 1.0, 2.0, 2.0).is_over(None)
    assert [curve(3.0, 1.0, 2.0, 2.0).is_over(n) for n in (1, 2, 3)] == [True, True, False]
    assert not curve(3.0, 2.0, 1.0).is_over(1)


def test_the_table_has_a_line_for_each_update() -> None:
    assert curve(4.5, 1.5).csv() == "updates,loss,held_out_loss\n0,,4.5\n1,3.0,\n2,2.0,1.5\n"
    assert Curve([1.0]).csv() == "updates,loss,held_out_loss\n1,1.0,\n"


def test_bars_are_as_high_as_their_numbers() -> None:
    assert bars([3.0, 2.0, 1.0]) == "█▅▁" and bars([]) == "" and bars([1.0]) == "▁"
    assert len(bars([float(n) for n in range(999)])) == 40
