"""When a worker's silence is suspicious, and when it is killed for it; looked at once a second."""

from port_agent.supervisor.job.silence_monitor import (
    LONGEST_LOOK_S,
    LONGEST_STEPS,
    RESTART_AFTER,
    SHORTEST_S,
    SilenceMonitor,
)


def silent(watch: SilenceMonitor, seconds: float, step_s: float | None = None, cpu_s: float = 0.0) -> bool:
    """Let this number of seconds pass; return whether the monitor would kill the worker."""
    killed = False
    for _ in range(round(seconds)):
        killed = watch.look(watch.looked_s + 1.0, cpu_s, step_s)
    return killed


def test_silence_without_work_is_stuck_and_then_killed() -> None:
    watch = SilenceMonitor(100.0)
    assert not silent(watch, SHORTEST_S) and not watch.stuck
    assert not silent(watch, 1.0) and watch.stuck
    assert silent(watch, (RESTART_AFTER - 1.0) * SHORTEST_S)


def test_a_slow_step_allows_a_long_silence() -> None:
    watch = SilenceMonitor(0.0)
    assert not silent(watch, LONGEST_STEPS * 30.0, 30.0) and not watch.stuck
    assert not silent(watch, 1.0, 30.0) and watch.stuck


def test_whoever_computes_is_at_work_however_long_it_is_silent() -> None:
    watch = SilenceMonitor(0.0)
    for second in range(1, 7200):
        assert not watch.look(float(second), 0.5 * second, 0.1) and not watch.stuck


def test_a_word_ends_the_suspicion() -> None:
    watch = SilenceMonitor(0.0)
    silent(watch, SHORTEST_S + 1.0)
    assert watch.stuck
    watch.note()
    assert not watch.stuck and not silent(watch, 5.0) and not watch.stuck


def test_work_before_the_silence_does_not_excuse_it() -> None:
    watch = SilenceMonitor(0.0)
    watch.look(1.0, 5000.0, None)
    assert not silent(watch, SHORTEST_S + 2.0, cpu_s=5000.0)
    assert watch.stuck


def test_a_supervisor_that_was_held_up_blames_nobody() -> None:
    watch = SilenceMonitor(0.0)
    assert not watch.look(86400.0, 0.0, None)
    assert not watch.stuck and watch.silent_s == LONGEST_LOOK_S
