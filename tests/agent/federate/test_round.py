"""Rounds as a process of their own: averaged, clipped, noisy, masked, with devices that lie or fall silent."""

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.agent.federate.jobs import adapter_file, gestures_bundle, needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MetricRecord  # noqa: E402

from port_agent.federate.orders import EXPONENTS, ServerStrategy, StrategySettings, global_file  # noqa: E402
from port_agent.federate.tensors import Arrays, federated_tensors  # noqa: E402
from port_agent.federate.wire import array_record, message_bytes, plain_arrays, read_message  # noqa: E402
from port_agent.jobs.job import FederationTerms  # noqa: E402
from port_planner.ir.bundle.bundle import read_manifest  # noqa: E402
from port_planner.ir.bundle.safetensors_io import Chunks  # noqa: E402
from tests.agent.federate.supervisor import Led  # noqa: E402
from tests.agent.peers.devices import identity  # noqa: E402

pytestmark = [needs_flower, pytest.mark.usefixtures("torch_forks")]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three devices, of which the last has fewer samples."""
    folder = tmp_path_factory.mktemp("bundles")
    return [gestures_bundle(folder, 0), gestures_bundle(folder, 1), gestures_bundle(folder, 2, 9)]


@pytest.fixture
def led(tmp_path: Path, bundles: list[Path]) -> Led:
    return Led(tmp_path, bundles)


def moved(led: Led, by: float) -> Arrays:
    initial = federated_tensors(led.bundle).initial()
    return {name: np.add(array, np.float32(by)) for name, array in initial.items()}


def close(arrays: Arrays, expected: Arrays, atol: float) -> bool:
    return all(np.allclose(arrays[name], expected[name], atol=atol, rtol=0.0) for name in expected)


@pytest.mark.process
def test_weights_are_averaged_by_samples_and_all_get_them(led: Led) -> None:
    ended = led.round()
    assert (ended["averaged"], ended["lost"]) == (3, {}) and abs(ended["loss"] - 0.25) < 1e-6
    samples = [read_manifest(member.bundle).samples for member in led.members.values()]
    mean = sum(count * (number + 1) for number, count in enumerate(samples)) / sum(samples)
    assert close(led.averaged(), moved(led, mean), 1e-5)
    assert led.round(number=2, final=True)["averaged"] == 3
    assert all(close(member.told(), led.averaged(), 0.0) for member in led.members.values())


@pytest.mark.process
def test_the_second_round_begins_where_the_first_ended(led: Led) -> None:
    for member in led.members.values():
        member.step = 1.0
    led.round()
    for _ in range(2):  # again: as after a cut between the average and its record
        led.round(number=2)
        assert close(led.averaged(), moved(led, 2.0), 1e-5)


@pytest.mark.process
def test_sums_have_the_same_bits_whoever_is_first(led: Led) -> None:
    for member in led.members.values():
        member.changed = small_change(member.step)
    found = []
    for order in (1, -1):
        led.members = dict(list(led.members.items())[::order])
        assert led.round()["averaged"] == 3
        found.append(led.averaged())
    assert all(np.array_equal(array, found[1][name]) for name, array in found[0].items())


@pytest.mark.process
def test_changes_are_clipped_and_devices_count_alike(led: Led) -> None:
    assert led.round(clip=2.0)["averaged"] == 3
    elements = sum(array.size for array in federated_tensors(led.bundle).initial().values())
    each = 2.0 / np.sqrt(elements)  # all change by the same in every element, and by more than the norm
    assert close(led.averaged(), moved(led, float(each)), 1e-5)


@pytest.mark.process
def test_noise_has_the_size_that_was_asked_for(led: Led) -> None:
    led.round(clip=3.0, noise=2.0)
    elements = sum(array.size for array in federated_tensors(led.bundle).initial().values())
    quiet = moved(led, float(3.0 / np.sqrt(elements)))
    noise = np.concatenate([np.subtract(array, quiet[name]).ravel() for name, array in led.averaged().items()])
    assert 0.75 * 2.0 < noise.std() < 1.25 * 2.0, "multiplier 2 times norm 3 over 3 devices"


@pytest.mark.process
def test_what_data_spends_ends_with_its_owners_budget(led: Led) -> None:
    """Two federations of noise 1 spend 6.57 together; the owner of one device lets 5 be spent, the others' leader 7."""
    careful = led.member(1)
    careful.terms = FederationTerms(epsilon_budget=5.0)
    private = {"clip": 1.0, "noise": 1.0, "epsilon_budget": 7.0}
    assert led.round(**private)["averaged"] == 3
    ended = led.round(run_id=8, **private)
    assert (
        ended["averaged"] == 2
        and "spent an epsilon of 4.38 at delta 1e-05; this round would make it 6.57" in ended["lost"]["member1"]
    )
    assert "above the budget of 7" in led.round(run_id=9, **private)["abandoned"]
    assert "lets" not in led.round()["abandoned"], "without a budget it is told what is spent, not refused"
    careful.terms = FederationTerms(epsilon_budget=100.0)
    assert "this round would make it inf" in led.round(number=2)["lost"]["member1"]


@pytest.mark.process
def test_the_first_round_is_held_against_the_budget_too(led: Led) -> None:
    led.member(1).terms = FederationTerms(epsilon_budget=4.0)
    lost = led.round(clip=1.0, noise=1.0)["lost"]
    assert (
        "spent an epsilon of 0 at delta 1e-05; this round would make it 4.38, above the budget of 4" in lost["member1"]
    )
    assert "this round would make it inf" in led.round(run_id=8)["lost"]["member1"], "without noise it is all spent"


@pytest.mark.process
def test_masked_sums_give_the_plain_average_to_their_step(led: Led) -> None:
    seen: list[float] = []

    def look(reply: bytes) -> bytes:
        arrays = read_message(reply).content.array_records
        seen.extend(float(np.abs(array).max()) for record in arrays.values() for array in plain_arrays(record).values())
        return reply

    for member in led.members.values():
        member.spoil = look
    ended = secretly(led)
    assert ended["averaged"] == 3 and abs(ended["loss"] - 0.25) < 1e-6
    assert seen == [], "no device's change is in what it sends"
    assert all(member.messages == 5 for member in led.members.values())
    masked_is_plain(led)


@pytest.mark.process
def test_adapters_of_a_few_sequences_are_not_lost_in_masked_sums(tmp_path: Path) -> None:
    """Changes of 1e-4 of three devices with 9 sequences each came back as zeros where the
    steps were those of weights.
    """
    files = [tmp_path / f"adapter{number}.port" for number in range(3)]
    for file in files:
        adapter_file(file)
    led = Led(tmp_path / "led", files)
    assert secretly(led)["averaged"] == 3
    masked_is_plain(led)


KINDS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of a number."""
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (4, 5))


@pytest.mark.process
@pytest.mark.parametrize("kind", list(KINDS))
def test_tensors_of_every_type_and_shape_are_averaged(tmp_path: Path, kind: str) -> None:
    """A single number was summed wrongly under masks: Flower leaves the offset of a sum in it."""
    files = [tmp_path / f"job{number}.port" for number in range(3)]
    for file in files:
        zeros = {shape: bytes(math.prod(shape) * KINDS[kind]) for shape in SHAPES}
        adapter_file(file, {f"t{list(shape)}": Chunks(kind, shape, partial(list, [it])) for shape, it in zeros.items()})
    led = Led(tmp_path / "led", files)
    for member in led.members.values():
        member.changed = small_change(member.step)
    found = {}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "clipped": {"clip": 1e3}, "masked": {"secure": True}}
    for way, settings in ways.items():
        assert led.round(**settings)["averaged"] == 3
        found[way] = led.averaged()
        (led.root / global_file(1)).unlink()
    largest = max(float(np.abs(array).max(initial=0.0)) for array in found["plain"].values())
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(kind, 2.0**-18) * 2 * largest
    assert 0 < largest < 1e-3 and all(close(found[way], found["plain"], step) for way in ("clipped", "masked"))
    assert {array.shape for array in found["masked"].values()} == {*SHAPES}


@pytest.mark.process
@pytest.mark.parametrize("settings", [{"secure": True}, {"clip": 1.0, "noise": 4.0}])
def test_no_variance_is_negative_whatever_is_added_to_it(led: Led, settings: dict[str, Any]) -> None:
    """Its root would be no number, and so would all that the trained model says."""
    variance, shrunk = "norm.running_var", np.float32(0.0)

    def change(arrays: Arrays) -> Arrays:
        return {
            **arrays,
            variance: np.multiply(arrays[variance], shrunk),
            "norm.bias": np.add(arrays["norm.bias"], np.float32(1e5)),
        }

    for member in led.members.values():
        member.changed = change
    assert led.round(**settings)["averaged"] == 3
    averaged, initial = led.averaged()[variance], federated_tensors(led.bundle).initial()[variance]
    assert averaged.min() >= 0.0
    if "noise" in settings:
        assert (averaged == initial).any() and not (averaged == initial).all(), "those that noise made negative"
    else:
        assert averaged.max() < 1.0


@pytest.mark.process
def test_whoever_widens_the_range_of_a_masked_sum_is_named(led: Led) -> None:
    def wide(reply: Message) -> None:
        metrics = reply.content.metric_records.get("metrics")
        if metrics is not None:
            powers = metrics["change-exponents"]
            assert isinstance(powers, list)
            metrics["change-exponents"] = [int(one) + 19 for one in powers]

    led.member(1).spoil = altered(wide)
    assert "the largest change that member1 reported is 5.2e+05 times" in led.round(secure=True)["abandoned"]


@pytest.mark.process
def test_an_average_that_its_type_cannot_hold_is_not_used(tmp_path: Path) -> None:
    files = [tmp_path / f"job{number}.port" for number in range(2)]
    for file in files:
        adapter_file(file, {"a": Chunks("float16", (3,), lambda: [bytes(6)])})
    led = Led(tmp_path / "led", files)
    for member in led.members.values():
        member.changed = lambda arrays: {name: np.add(array, np.float32(6e4)) for name, array in arrays.items()}
    momentum = StrategySettings(strategy=ServerStrategy.FEDAVGM, rate=2.0)
    ended = led.round(server=momentum)
    assert "a has numbers that float16 cannot hold" in ended["abandoned"] and not (led.root / global_file(1)).exists()


def secretly(led: Led) -> dict[str, Any]:
    """Do a masked round of small changes; returns how it ended."""
    for member in led.members.values():
        member.changed = small_change(member.step)
    return led.round(secure=True)


def masked_is_plain(led: Led) -> None:
    """Hold what a masked round averaged against a plain one of the same changes."""
    masked = led.averaged()
    (led.root / global_file(1)).unlink()
    assert led.round()["averaged"] == 3
    plain, initial = led.averaged(), federated_tensors(led.bundle).initial()
    largest = max(float(np.abs(np.subtract(plain[name], initial[name])).max()) for name in plain)
    step = 2.0**-21 * 2 * 3 * 2 * largest  # of the next power of two, of three devices, weighted
    rounded = max(float(np.spacing(np.abs(initial[name]).max())) for name in plain)
    assert 0 < largest < 1e-3 and close(masked, plain, step + rounded)


def small_change(step: float) -> "Callable[[Arrays], Arrays]":
    """Return a change of the size that a round of training makes, another for each device and each number."""

    def change(arrays: Arrays) -> Arrays:
        draw = np.random.default_rng(int(step))
        return {
            name: np.add(array, np.float32(1e-4) * draw.standard_normal(array.shape, np.float32))
            for name, array in arrays.items()
        }

    return change


@pytest.mark.process
def test_no_sum_of_two_is_unmasked(led: Led) -> None:
    last = led.member(2)
    last.spoil = lambda reply: reply if last.messages < 4 else None
    before = federated_tensors(led.bundle).initial()
    ended = led.round(secure=True, timeout_s=16.0)
    assert not ended["averaged"] and "needs 3 of 3 (member2: no reply in time)" in ended["abandoned"]
    assert not (led.root / global_file(1)).exists() and before


@pytest.mark.process
@pytest.mark.parametrize(("stage", "reply"), [(2, b"junk"), (3, b"junk"), (4, None)])
def test_a_fifth_that_is_lost_while_sums_are_masked_is_left_out(
    led: Led, bundles: list[Path], stage: int, reply: bytes | None
) -> None:
    """It tells nothing of use any more, or nothing at all, before it shared its keys or after that."""
    led.add(bundles[1])
    led.add(bundles[1])
    last = led.member(4)
    last.spoil = lambda own: own if last.messages < stage else reply
    assert led.round(secure=True, timeout_s=16.0)["averaged"] == 4
    samples = [read_manifest(led.member(number).bundle).samples for number in range(4)]
    mean = sum(count * (number + 1) for number, count in enumerate(samples)) / sum(samples)
    assert close(led.averaged(), moved(led, mean), 1e-4)


@pytest.mark.process
def test_keys_that_a_leader_draws_itself_get_no_change(led: Led) -> None:
    """The leader answers for device 1: brings device 0 keys of its own in its place, and its shares."""
    victim, replaced = led.member(0), led.member(1)
    replaced.state_dir.joinpath("identity.pem").write_bytes(identity(replaced.state_dir / "leader").file.read_bytes())
    seen: list[bytes] = []
    victim.spoil = lambda reply: seen.append(reply) or reply
    ended = led.round(secure=True, timeout_s=6.0)
    assert "a device did not sign the keys" in ended["abandoned"] and not ended["averaged"]
    assert all(b"masked_params" not in reply for reply in seen), "nothing of its change went"


def other_weights(message: Message) -> None:
    """Weights at which a device learns nothing, or little."""
    for name, record in list(message.content.array_records.items()):
        arrays = {key: np.add(array, np.ones((), array.dtype)) for key, array in plain_arrays(record).items()}
        message.content.array_records[name] = array_record(arrays)


def other_ranges(message: Message) -> None:
    """Ranges of which a device's change is no step."""
    record = message.content.config_records.get("secaggplus_configs", ConfigRecord())
    ranges = record.get(EXPONENTS)
    if isinstance(ranges, bytes):
        record[EXPONENTS] = msgspec.json.encode([power + 40 for power in msgspec.json.decode(ranges)])


def other_samples(message: Message) -> None:
    """A largest number of samples beside which a device's own are nothing."""
    record = message.content.config_records.get("secaggplus_configs", ConfigRecord())
    if "max_weight" in record:
        record["max_weight"] = 1e12


@pytest.mark.process
@pytest.mark.parametrize("lie", [other_weights, other_ranges, other_samples])
def test_a_leader_that_makes_the_others_changes_vanish_gets_no_change(led: Led, lie: Callable[[Message], None]) -> None:
    """The sum would be one device's change: each of these went through, and the leader had it."""
    seen: list[bytes] = []
    led.member(0).spoil = lambda reply: seen.append(reply) or reply
    for number in (1, 2):
        led.member(number).brought = altered(lie)
    ended = secretly(led)
    assert not ended["averaged"] and "a device did not sign the keys, weights and ranges" in ended["abandoned"]
    assert len(seen) == 4 and all(b"masked_params" not in reply for reply in seen), "nothing of its change went"


@pytest.mark.process
def test_a_device_whose_samples_would_vanish_contributes_nothing(led: Led) -> None:
    """A leader that tells all the same largest number would have only the bits of who has the most samples."""
    for member in led.members.values():
        member.brought = altered(other_samples)
    assert "samples would vanish beside the round's largest number" in secretly(led)["abandoned"]


@pytest.mark.process
def test_a_device_that_another_does_not_know_ends_the_masked_sum(led: Led) -> None:
    shutil.rmtree(led.member(0).state_dir / "paired")
    ended = led.round(secure=True, timeout_s=6.0)
    assert "an unpaired device takes part" in ended["abandoned"]


@pytest.mark.process
def test_changes_that_cancel_each_other_are_no_average(led: Led) -> None:
    signs = iter((1.0, 1.0, -2.0))
    for member in led.members.values():
        member.bundle, member.step = led.bundle, next(signs)
    ended = led.round(secure=True)
    assert "of the average change, more than 1%" in ended["abandoned"]


@pytest.mark.process
def test_masked_sums_of_other_sizes_are_left_out(led: Led) -> None:
    led.add(led.member(1).bundle)
    led.add(led.member(1).bundle)
    last = led.member(2)

    def shorter(reply: bytes) -> bytes:
        message = read_message(reply)
        record = message.content.config_records.get("secaggplus_configs", ConfigRecord())
        if "masked_params" in record:
            masked = record["masked_params"]
            assert isinstance(masked, list)
            record["masked_params"] = masked[:-1]
        return message_bytes(message)

    last.spoil = shorter
    ended = led.round(secure=True)
    assert ended["averaged"] == 4 and "masked sums have other sizes" in ended["lost"]["member2"]


@pytest.mark.process
def test_what_no_device_may_say_is_left_out(led: Led) -> None:
    def not_finite(reply: bytes) -> bytes:
        message = read_message(reply)
        arrays = plain_arrays(message.content.array_records["arrays"])
        message.content.array_records["arrays"] = array_record(
            {name: np.multiply(array, np.nan) for name, array in arrays.items()}
        )
        return message_bytes(message)

    led.member(1).spoil = not_finite
    led.member(2).spoil = lambda reply: reply[: len(reply) // 2]
    ended = led.round(min_share=0.3)
    assert ended["averaged"] == 1 and set(ended["lost"]) == {"member1", "member2"}
    assert "not finite" in ended["lost"]["member1"] and "not a Flower message" in ended["lost"]["member2"]
    assert close(led.averaged(), moved(led, 1.0), 1e-5)


@pytest.mark.process
def test_a_reply_to_an_earlier_round_is_left_out(led: Led) -> None:
    said_before: list[bytes] = []

    def repeated(reply: bytes) -> bytes:
        said_before.append(reply)
        return said_before[0]

    led.member(1).spoil = repeated
    assert led.round()["averaged"] == 3
    ended = led.round(number=2)
    assert ended["averaged"] == 2 and ended["lost"] == {"member1": "it replies to a message of another round"}


def altered(alter: Callable[[Message], None]) -> Callable[[bytes], bytes]:
    """Return how a reply is altered on its way."""

    def spoil(reply: bytes) -> bytes:
        message = read_message(reply)
        alter(message)
        return message_bytes(message)

    return spoil


def said(message: Message) -> MetricRecord:
    found: MetricRecord = message.content.metric_records["metrics"]
    return found


@pytest.mark.process
def test_lies_of_every_kind_are_left_out_by_name(tmp_path: Path) -> None:
    """What Flower's strategies would end with an exception for, or what would be the average alone."""
    lies: dict[str, Callable[[Message], None]] = {
        "its records are not the requested ones: arrays, metrics, more": lambda reply: (
            reply.content.array_records.update(more=array_record({"a": np.zeros(3, np.float32)}))
        ),
        "its records are not the requested ones: arrays, metrics, x": lambda reply: reply.content.metric_records.update(
            x=MetricRecord({"a": 1})
        ),
        "its loss is 1e+308": lambda reply: said(reply).update({"loss": 1e308}),
        "times the median of all devices": lambda reply: reply.content.array_records.update(
            arrays=array_record(
                {
                    name: np.full_like(array, 3e38)
                    for name, array in plain_arrays(reply.content.array_records["arrays"]).items()
                }
            )
        ),
        "its number of samples is 1.2e+11 times the median": lambda reply: said(reply).update(
            {"num-examples": (1 << 40) - 1}
        ),
    }
    files = [tmp_path / f"adapter{number}.port" for number in range(2 * len(lies) + 1)]
    for file in files:
        adapter_file(file)
    led = Led(tmp_path / "led", files)
    for number, lie in enumerate(lies.values()):
        led.member(number).spoil = altered(lie)
    ended = led.round()
    assert ended["averaged"] == len(lies) + 1
    for number, why in enumerate(lies):
        assert why in ended["lost"][f"member{number}"]
    honest = range(len(lies), len(files))
    assert close(led.averaged(), moved(led, sum(number + 1 for number in honest) / len(honest)), 1e-5)


@pytest.mark.process
def test_who_does_not_clip_is_left_out(led: Led) -> None:
    """Devices clip their own changes: the leader holds each against the norm, and its weight against one."""

    def unclipped(reply: Message) -> None:
        arrays = plain_arrays(reply.content.array_records["arrays"])
        told = {name: np.multiply(array, np.float32(1.01)) for name, array in arrays.items()}
        reply.content.array_records["arrays"] = array_record(told)

    led.member(1).spoil = altered(unclipped)
    led.member(2).spoil = altered(lambda reply: said(reply).update({"num-examples": 9}))
    ended = led.round(clip=0.01, min_share=0.3)
    assert ended["averaged"] == 1 and "not at most 0.01 and 1" in ended["lost"]["member1"]
    assert "a weight of 9, not at most 0.01 and 1" in ended["lost"]["member2"]


@pytest.mark.process
def test_a_false_share_gives_no_average(led: Led) -> None:
    """One bit of a share that is not in its padding: Flower recovers another mask, and its sum is noise."""

    def false_share(reply: Message) -> None:
        record = reply.content.config_records["secaggplus_configs"]
        shares = record["shares"]
        assert isinstance(shares, list)
        record["shares"] = [
            share[:6] + bytes([share[6] ^ 1]) + share[7:] for share in shares if isinstance(share, bytes)
        ]

    last = led.member(2)
    last.spoil = lambda reply: altered(false_share)(reply) if last.messages == 5 else reply
    ended = led.round(secure=True)
    assert not ended["averaged"] and "a device sent false masks or shares" in ended["abandoned"]


@pytest.mark.process
def test_too_few_replies_and_the_round_never_was(led: Led) -> None:
    led.member(1).spoil = led.member(2).spoil = lambda reply: None
    ended = led.round(timeout_s=8.0)
    assert "1 of 3 devices replied, 2 are needed" in ended["abandoned"]
    assert all(f"{name}: no reply in time" in ended["abandoned"] for name in ("member1", "member2"))
    assert not (led.root / global_file(1)).exists()


@pytest.mark.process
def test_enough_replies_end_a_round(led: Led) -> None:
    ended = led.round(goal=2)
    assert ended["averaged"] == 2 and list(ended["lost"].values()) == ["enough others replied before"]
