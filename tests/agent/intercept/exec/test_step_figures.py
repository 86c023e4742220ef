"""Steps since a moment take what was taken since then."""

from port_agent.intercept.exec.step_figures import StepFigures
from port_agent.worker.protocol import StepDone


def test_what_steps_took_is_the_difference() -> None:
    before = StepFigures(3, 10.0, 5.0, 1.0, 100, 200, 20, 1000)
    after = StepFigures(5, 14.0, 8.0, 1.5, 150, 290, 50, 1200)
    assert after.step_since(before, loss=2.5, total_steps=9) == StepDone(
        step=5,
        epoch=0,
        loss=2.5,
        wall_s=4.0,
        cpu_s=3.0,
        phases_s={"stall": 0.5},
        paged_in_bytes=50,
        paged_out_bytes=90,
        unworn_bytes=30,
        peak_rss_bytes=1200,
        total_steps=9,
    )
