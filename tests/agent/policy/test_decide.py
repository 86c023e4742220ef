"""The decision: a table of every condition, and 10,000 random days."""

import random
from dataclasses import replace
from datetime import datetime, time, timedelta
from typing import Any

import pytest

from port_agent.facts import Answer, Facts, Fault, IdleSignal, Power, ThrottleReading
from port_agent.policy.decide import (
    Memory,
    Now,
    Policy,
    PolicyDecision,
    ResourceLimits,
    State,
    TimeWindow,
    decide,
    next_window,
    window_closes_in_s,
)

MIB = 1 << 20
NOON = datetime(2026, 6, 3, 12, 0)  # a Wednesday
IDLE = (IdleSignal("load", Answer.YES, "others use 2 % CPU"),)
BUSY = (IdleSignal("load", Answer.NO, "others use 80 % CPU"),)
SILENT = (IdleSignal("load", Answer.UNKNOWN, "no CPU figure yet"),)
ONLY_LOGIND = (IdleSignal("logind", Answer.NO, "IdleHint=no", weak=True),)
GOOD = Facts(
    power=Power.EXTERNAL,
    battery_percent=80.0,
    idle_signals=IDLE,
    temperature_c=50.0,
    throttle=ThrottleReading(Answer.NO),
    free_disk_bytes=10_000 * MIB,
    available_memory_bytes=1000 * MIB,
)
POLICY = Policy()
RESTED = Memory(idle_since_s=0.0, idle_known_at_s=0.0)
TRAINING = replace(RESTED, training=True)
NOW = Now(1000.0, NOON)
NIGHTS = tuple(TimeWindow(day, time(22), time(7)) for day in range(7))


def test_good_conditions_train() -> None:
    decision = decide(GOOD, POLICY, NOW, RESTED)
    assert decision.state is State.TRAIN
    assert decision.codes == ("go",)
    assert "80 %" in decision.reasons[0] and "50 °C" in decision.reasons[0]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"pause": "paused by you"}, "user", "port-agent job resume"),
        ({"power": Power.BATTERY, "battery_percent": 64.0}, "battery", "on battery 64 %"),
        ({"power": Power.UNKNOWN, "power_detail": "BAT0: unknown"}, "power", "BAT0: unknown"),
        ({"battery_percent": 12.0}, "low-battery", "battery 12 %, training needs 30 %"),
        ({"idle_signals": BUSY}, "in-use", "others use 80 % CPU"),
        ({"temperature_c": 76.0}, "hot", "76 °C is too hot (limit 75); resumes at 65 °C"),
        ({"throttle": ThrottleReading(Answer.YES, "under-voltage")}, "throttled", "under-voltage"),
        ({"free_disk_bytes": 10 * MIB}, "disk", "10.0 MiB of disk space free, training needs 512.0 MiB"),
        ({"free_inodes": 3}, "inodes", "only 3 more files (inodes) fit on the disk, training needs 64"),
        ({"available_memory_bytes": 5 * MIB}, "memory", "5.0 MiB of memory available"),
        ({"flash_written_today_bytes": 17000 * MIB}, "flash", "16.0 GiB is used up"),
    ],
)
def test_each_condition_stops_with_its_reason(change: dict[str, Any], code: str, words: str) -> None:
    decision = decide(replace(GOOD, **change), POLICY, NOW, TRAINING)
    assert decision.state is State.LEAVE
    assert decision.codes == (code,)
    assert words in decision.reasons[0]
    assert not decision.memory.training


@pytest.mark.parametrize(
    ("change", "policy"),
    [
        ({"power": Power.ASSUMED}, POLICY),
        ({"power": Power.BATTERY}, replace(POLICY, require_external_power=False)),
        ({"power": Power.UNKNOWN}, replace(POLICY, assume_power=Power.EXTERNAL)),
        ({"battery_percent": None}, POLICY),
        ({"temperature_c": None}, POLICY),
        ({"throttle": ThrottleReading(Answer.UNKNOWN)}, POLICY),
        ({"throttle": ThrottleReading(Answer.YES)}, replace(POLICY, stop_when_throttled=False)),
        ({"free_disk_bytes": None, "available_memory_bytes": None}, POLICY),
        ({"free_inodes": 0}, replace(POLICY, min_free_disk_bytes=0)),
        ({"free_inodes": 64}, POLICY),
        ({"idle_signals": BUSY}, replace(POLICY, idle_for_s=0.0)),
        ({"idle_signals": (*IDLE, *ONLY_LOGIND)}, POLICY),
        ({"temperature_c": 75.0}, POLICY),
    ],
)
def test_what_does_not_stop(change: dict[str, Any], policy: Policy) -> None:
    assert decide(replace(GOOD, **change), policy, NOW, RESTED).state is State.TRAIN


SILENT_PROBE = (Fault("temperature", "does not answer"),)


@pytest.mark.parametrize(
    ("change", "override"),
    [
        ({"temperature_c": None, "faults": SILENT_PROBE}, {"max_temperature_c": 120.0}),
        ({"faults": SILENT_PROBE}, {"max_temperature_c": 120.0}),  # the one of several that is missed
        ({"temperature_c": None, "faults": (Fault("temperature/zone0", "EIO"),)}, {"max_temperature_c": 120.0}),
        ({"free_disk_bytes": None, "faults": (Fault("disk", "EIO"),)}, {"min_free_disk_bytes": 0}),
        ({"available_memory_bytes": None, "faults": (Fault("memory", "EIO"),)}, {"min_free_memory_bytes": 0}),
        ({"faults": (Fault("terminals", "EACCES"),)}, {"idle_for_s": 0.0}),
        ({"faults": (Fault("cpu load", "EIO"),)}, {"train_while_in_use": True}),
        ({"faults": (Fault("pressure/io", "EIO"),)}, {"idle_for_s": 0.0}),
        ({"faults": (Fault("logind", "no answer"),)}, {"idle_for_s": 0.0}),
        ({"faults": (Fault("gpu", "no answer"),)}, {"idle_for_s": 0.0}),
        (
            {"throttle": ThrottleReading(Answer.UNKNOWN), "faults": (Fault("throttling", "EIO"),)},
            {"stop_when_throttled": False},
        ),
    ],
)
def test_a_sensor_that_is_asked_and_cannot_be_read_stops_by_its_name(
    change: dict[str, Any], override: dict[str, Any]
) -> None:
    facts = replace(GOOD, **change)
    decision = decide(facts, POLICY, NOW, TRAINING)
    assert decision.codes == ("unreadable",)
    assert facts.faults[0].sensor in decision.reasons[0] and facts.faults[0].reason in decision.reasons[0]
    assert decide(facts, replace(POLICY, **override), NOW, RESTED).state is State.TRAIN


@pytest.mark.parametrize("sensor", ["temperature/thermal_zone7", "memory pressure", "network/eth0", "power/BAT1"])
def test_a_fault_that_decides_nothing_stops_nothing(sensor: str) -> None:
    assert decide(replace(GOOD, faults=(Fault(sensor, "EINVAL"),)), POLICY, NOW, RESTED).state is State.TRAIN


def test_a_battery_of_unknown_level_is_not_drained() -> None:
    """It may be used, down to a level that is not known."""
    policy = replace(POLICY, require_external_power=False)
    for level, codes in ((80.0, ("go",)), (None, ("low-battery",))):
        facts = replace(GOOD, power=Power.BATTERY, battery_percent=level)
        assert decide(facts, policy, NOW, RESTED).codes == codes
    assert decide(facts, replace(policy, min_battery_percent=0.0), NOW, RESTED).state is State.TRAIN


def test_all_reasons_are_given_at_once() -> None:
    facts = replace(GOOD, power=Power.BATTERY, temperature_c=90.0, idle_signals=BUSY)
    assert decide(facts, POLICY, NOW, TRAINING).codes == ("battery", "in-use", "hot")


def test_idle_time_is_counted() -> None:
    decision = decide(GOOD, POLICY, NOW, Memory())
    assert decision.codes == ("idle",)
    later = decide(GOOD, POLICY, Now(1120.0, NOON), decision.memory)
    assert later.reasons == ("idle for 2 min 00 s of 5 min 00 s",)
    assert decide(GOOD, POLICY, Now(1300.0, NOON), later.memory).state is State.TRAIN


def test_use_restarts_the_count_and_silence_does_so_after_a_minute() -> None:
    busy = decide(replace(GOOD, idle_signals=BUSY), POLICY, NOW, RESTED)
    assert decide(GOOD, POLICY, Now(1001.0, NOON), busy.memory).codes == ("idle",)
    known = replace(RESTED, idle_known_at_s=1000.0)
    silent = replace(GOOD, idle_signals=SILENT)
    assert decide(silent, POLICY, Now(1059.0, NOON), known).state is State.TRAIN
    assert decide(silent, POLICY, Now(1061.0, NOON), known).codes == ("presence",)


def test_logind_alone_does_not_prove_use_but_nor_does_it_prove_idle() -> None:
    decision = decide(replace(GOOD, idle_signals=ONLY_LOGIND), POLICY, NOW, Memory())
    assert decision.codes == ("presence",)
    assert "cannot tell" in decision.reasons[0]


def test_temperature_hysteresis() -> None:
    hot = decide(replace(GOOD, temperature_c=80.0), POLICY, NOW, TRAINING)
    cooler = decide(replace(GOOD, temperature_c=70.0), POLICY, Now(2000.0, NOON), hot.memory)
    assert cooler.codes == ("hot",)
    blind = decide(replace(GOOD, temperature_c=None), POLICY, Now(2100.0, NOON), cooler.memory)
    assert blind.codes == ("hot",)
    assert decide(replace(GOOD, temperature_c=64.0), POLICY, Now(2200.0, NOON), blind.memory).state is State.TRAIN


@pytest.mark.parametrize(
    ("field", "low", "between", "enough"),
    [
        ("battery_percent", 20.0, 33.0, 35.0),
        ("free_disk_bytes", 500 * MIB, 600 * MIB, 640 * MIB),
        ("available_memory_bytes", 60 * MIB, 70 * MIB, 80 * MIB),
    ],
)
def test_margins_before_going_on(field: str, low: float, between: float, enough: float) -> None:
    facts = {level: replace(GOOD, **dict[str, Any]({field: level})) for level in (low, between, enough)}
    first = decide(facts[low], POLICY, NOW, TRAINING)
    second = decide(facts[between], POLICY, Now(2000.0, NOON), first.memory)
    assert not second.state.trains
    assert decide(facts[enough], POLICY, Now(3000.0, NOON), second.memory).state is State.TRAIN


def test_a_battery_that_is_taken_out_ends_its_hysteresis() -> None:
    low = decide(replace(GOOD, battery_percent=20.0), POLICY, NOW, TRAINING)
    silent = replace(GOOD, battery_percent=None)
    assert decide(silent, POLICY, Now(2000.0, NOON), low.memory).codes == ("low-battery",)
    assert decide(replace(silent, battery=Answer.NO), POLICY, Now(3000.0, NOON), low.memory).state is State.TRAIN


def test_a_pause_lasts_at_least_the_minimum() -> None:
    stopped = decide(replace(GOOD, power=Power.BATTERY), POLICY, NOW, TRAINING)
    soon = decide(GOOD, POLICY, Now(1030.0, NOON), stopped.memory)
    assert soon.codes == ("settling",)
    assert "starting in 30.0 s" in soon.reasons[0]
    assert decide(GOOD, POLICY, Now(1060.0, NOON), soon.memory).state is State.TRAIN


def test_the_users_own_pause_is_not_damped() -> None:
    stopped = decide(replace(GOOD, pause="paused by you"), POLICY, NOW, TRAINING)
    assert decide(GOOD, POLICY, Now(1000.5, NOON), stopped.memory).state is State.TRAIN


def test_memory_is_kept_while_paused_only_as_long_as_wished() -> None:
    policy = replace(POLICY, keep_in_memory_for_s=120.0)
    hot = decide(replace(GOOD, temperature_c=80.0), policy, NOW, TRAINING)
    assert hot.state is State.PAUSE
    still = decide(replace(GOOD, temperature_c=80.0), policy, Now(1119.0, NOON), hot.memory)
    assert still.state is State.PAUSE
    assert decide(replace(GOOD, temperature_c=80.0), policy, Now(1120.0, NOON), still.memory).state is State.LEAVE


@pytest.mark.parametrize(
    "change",
    [{"power": Power.BATTERY}, {"idle_signals": BUSY}, {"available_memory_bytes": MIB}, {"pause": "paused by you"}],
)
def test_memory_is_given_back_at_once_when_somebody_needs_it(change: dict[str, Any]) -> None:
    policy = replace(POLICY, keep_in_memory_for_s=120.0)
    assert decide(replace(GOOD, **change), policy, NOW, TRAINING).state is State.LEAVE


def test_training_gently_while_in_use() -> None:
    policy = replace(POLICY, train_while_in_use=True)
    busy = decide(replace(GOOD, idle_signals=BUSY), policy, NOW, TRAINING)
    assert busy.state is State.TRAIN_GENTLY
    early = decide(GOOD, policy, Now(1001.0, NOON), busy.memory)
    assert early.state is State.TRAIN_GENTLY
    assert decide(GOOD, policy, Now(1301.0, NOON), early.memory).state is State.TRAIN


@pytest.mark.parametrize(
    ("local", "open_"),
    [
        (datetime(2026, 6, 3, 21, 59), False),
        (datetime(2026, 6, 3, 22, 0), True),
        (datetime(2026, 6, 4, 6, 59), True),
        (datetime(2026, 6, 4, 7, 0), False),
    ],
)
def test_windows_run_past_midnight(local: datetime, open_: bool) -> None:
    policy = replace(POLICY, windows=NIGHTS)
    decision = decide(GOOD, policy, Now(1000.0, local), RESTED)
    assert (decision.state is State.TRAIN) is open_
    if not open_:
        assert decision.codes == ("window",)
        assert f"opens {local:%a} 22:00" in decision.reasons[0]


def test_a_clock_that_is_not_set_opens_no_window() -> None:
    unset = Now(1000.0, datetime(1970, 1, 1, 23, 0), clock_is_set=False)
    decision = decide(GOOD, replace(POLICY, windows=NIGHTS), unset, RESTED)
    assert decision.codes == ("clock",) and "1970-01-01 23:00" in decision.reasons[0]
    assert decide(GOOD, POLICY, unset, RESTED).state is State.TRAIN, "without windows the date decides nothing"


def test_windows_of_one_weekday() -> None:
    policy = replace(POLICY, windows=(TimeWindow(6, time(0), time(0)),))  # all of Sunday
    assert next_window(policy, NOON) == datetime(2026, 6, 7, 0, 0)
    assert decide(GOOD, policy, Now(0.0, datetime(2026, 6, 7, 23, 59)), RESTED).codes != ("window",)
    assert decide(GOOD, policy, Now(1000.0, datetime(2026, 6, 8, 0, 0)), RESTED).codes == ("window",)


@pytest.mark.parametrize(
    ("local", "seconds"),
    [
        (datetime(2026, 6, 3, 22, 0), 9 * 3600),
        (datetime(2026, 6, 4, 6, 59, 50), 10),
        (datetime(2026, 6, 4, 7, 0), None),
    ],
)
def test_when_the_window_closes(local: datetime, seconds: float | None) -> None:
    assert window_closes_in_s(replace(POLICY, windows=NIGHTS), local) == seconds
    assert window_closes_in_s(POLICY, local) is None


def test_windows_that_touch_are_one() -> None:
    touching = (TimeWindow(2, time(20), time(0)), TimeWindow(3, time(0), time(3)), TimeWindow(3, time(2), time(5)))
    policy = replace(POLICY, windows=touching)
    assert window_closes_in_s(policy, datetime(2026, 6, 3, 23, 0)) == 6 * 3600
    always = replace(POLICY, windows=tuple(TimeWindow(day, time(0), time(0)) for day in range(7)))
    assert window_closes_in_s(always, NOON) is None


def test_memory_limits() -> None:
    assert ResourceLimits(memory_percent=50.0).memory_limit(1000) == 500
    assert ResourceLimits(memory_percent=100.0, memory_bytes=300).memory_limit(1000) == 300
    assert ResourceLimits(memory_percent=50.0).memory_limit(None) is None


def random_facts(rng: random.Random, previous: Facts) -> Facts:
    """Return facts that wander: most stay, some jump, any may become unknown."""

    def maybe(value: Any, choices: list[Any], chance: float = 0.15) -> Any:
        return rng.choice(choices) if rng.random() < chance else value

    drift = rng.uniform(-6, 6)
    temperature = None if rng.random() < 0.02 else min(95.0, max(30.0, (previous.temperature_c or 65.0) + drift))
    return replace(
        previous,
        power=maybe(previous.power, list(Power)),
        battery_percent=maybe(previous.battery_percent, [None, 20.0, 29.0, 31.0, 34.0, 36.0, 90.0]),
        idle_signals=maybe(previous.idle_signals, [IDLE, IDLE, BUSY, SILENT, ONLY_LOGIND, ()]),
        temperature_c=temperature,
        throttle=maybe(previous.throttle, [ThrottleReading(answer) for answer in Answer], 0.05),
        free_disk_bytes=maybe(previous.free_disk_bytes, [None, 500 * MIB, 600 * MIB, 5000 * MIB], 0.05),
        available_memory_bytes=maybe(previous.available_memory_bytes, [None, 60 * MIB, 70 * MIB, 900 * MIB], 0.05),
    )


def random_day(seed: int) -> list[tuple[float, PolicyDecision]]:
    rng = random.Random(seed)
    policy = replace(
        POLICY,
        idle_for_s=rng.choice([0.0, 10.0, 60.0]),
        keep_in_memory_for_s=rng.choice([0.0, 30.0]),
        train_while_in_use=rng.random() < 0.2,
        windows=NIGHTS if rng.random() < 0.2 else (),
    )
    facts, memory, moment, local = GOOD, RESTED, 0.0, NOON + timedelta(hours=rng.random() * 24)
    decisions = []
    for _ in range(10):
        facts = random_facts(rng, facts)
        decision = decide(facts, policy, Now(moment, local), memory)
        decisions.append((moment, decision))
        memory = decision.memory
        moment += rng.choice([0.05, 1.0, 30.0, 40.0, 70.0])
        jump = rng.choice([-3 * 3600, 5 * 3600]) if rng.random() < 0.05 else 0
        local += timedelta(seconds=moment - decisions[-1][0] + jump)
    return decisions


@pytest.mark.slow
def test_ten_thousand_random_sequences_never_flap_and_always_have_a_reason() -> None:
    trained = 0
    for seed in range(10_000):
        stopped_at: float | None = None
        training = False
        for moment, decision in random_day(seed):
            assert decision.reasons and all(decision.reasons), (seed, moment)
            assert len(decision.reasons) == len(decision.codes)
            assert decision.memory.training is decision.state.trains
            if decision.state.trains and not training and stopped_at is not None:
                assert moment - stopped_at >= POLICY.min_pause_s, (seed, moment)
            if training and not decision.state.trains:
                stopped_at = moment
            training = decision.state.trains
            trained += training
    assert trained > 10_000  # the sequences do train, so the bound above was exercised
