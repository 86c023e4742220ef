"""The dispatch mode alone: where its mere presence would change bits, and what it refuses."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from port_agent import budget
from port_agent.finetuning.quantized.linear import encode_weight
from port_agent.intercept.budget import keeping, without_prefetch
from port_agent.packing.quantized import Quantization

LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "rnn": lambda: torch.nn.RNN(24, 24, batch_first=True),
    "gru": lambda: torch.nn.GRU(24, 24, batch_first=True),
    "lstm": lambda: torch.nn.LSTM(24, 24, batch_first=True),
    "attention": lambda: torch.nn.TransformerEncoderLayer(24, 4, 48, batch_first=True),
}


@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("limit", ["4K", "1G"])
def test_inference_mode_has_the_bits_of_plain_pytorch(layer: str, limit: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = LAYERS[layer]().eval(), torch.randn(3, 4, 24)
    with torch.inference_mode():
        plain = module(x)
        with budget(tensors=limit, page_dir=tmp_path).resizing():
            followed = module(x)
    plain, followed = (out[0] if isinstance(out, tuple) else out for out in (plain, followed))
    assert torch.equal(plain, followed)


def test_while_held_no_operator_runs_and_the_memory_is_away(tmp_path: Path) -> None:
    made: list[torch.Tensor] = []
    with budget(tensors="100M", page_dir=tmp_path).resizing() as b:
        x = torch.randn(1000, 1000)
        y = x @ x
        expected = [(y + 1).sum().item(), x.sum().item()]
        assert b.interceptor.hold() and b.interceptor.operator_at_hand == "aten::_local_scalar_dense"
        thread = threading.Thread(target=lambda: made.append(y + 1))
        thread.start()
        b.interceptor.give_back()
        assert b.interceptor.table.resident_bytes == 0 and made == []
        b.interceptor.go_on()
        thread.join()
        assert [made[0].sum().item(), x.sum().item()] == expected
        assert b.report.over_bytes == 0


def test_ctrl_c_ends_the_wait_of_a_held_program_and_its_clean_up_runs(tmp_path: Path) -> None:
    with budget(tensors="100M", page_dir=tmp_path).resizing() as b:
        x = torch.ones(1000, 1000)
        b.interceptor.hold()
        b.interceptor.give_back()
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            x.add_(1)
        assert x.sum().item() == 1_000_000


def test_what_is_kept_stays_while_others_leave_and_leaves_where_no_other_can(tmp_path: Path) -> None:
    weights, row_bytes = [torch.randn(256, 256) for _ in range(8)], 256 * 256 * 4
    with budget(tensors=5 * row_bytes, page_dir=tmp_path).resizing() as b:
        interceptor = b.interceptor
        stored = [interceptor.table.of(weight) for weight in weights]
        expected = [weight.square().sum().item() for weight in weights]
        with keeping(weights[:2], then=weights[2:3]):
            for _ in range(2):
                for weight in weights[2:]:
                    weight.square()
            assert all(s is not None and s.resident for s in stored[:2])
            read_bytes = b.report.read_bytes
            weights[0].square(), weights[1].square()
            assert b.report.read_bytes == read_bytes
        with keeping(weights[:2]), torch.no_grad():
            torch.stack(
                weights[2:4]
            )  # 2 operands, a result of twice their size and what is kept are more than there is room for
            assert not all(s is not None and s.resident for s in stored[:2])
        with keeping(weights[:4]):  # more than half of the room
            assert not interceptor.residency.kept
        with keeping(weights[:4], most=0.9):
            assert interceptor.residency.kept == set(stored[:4])
        assert not interceptor.residency.kept and b.report.over_bytes == 0
        assert [weight.square().sum().item() for weight in weights] == expected


@pytest.mark.slow
def test_without_foresight_nothing_is_recorded_and_segments_before_are_recognised_after(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), torch.randn(4, 256)
    optimizer = torch.optim.SGD(model.parameters())

    def losses(steps: int) -> list[float]:
        found = []
        for step in range(steps):
            for _ in range(2):
                with without_prefetch():
                    loss = model(x * (step + 1)).square().mean()
                    loss.backward()
                found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    with budget(tensors="1M", page_dir=tmp_path).resizing() as b:
        mine = losses(3)
        book = b.interceptor.book
        assert all(len(trace) < 30 for trace in book.traces), "none has a forward or backward pass"
        assert b.report.written_bytes > 0 and book.segments_matched > 0
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))), torch.randn(4, 256)
    optimizer = torch.optim.SGD(model.parameters())
    assert losses(3) == mine


def test_the_first_product_over_a_grid_has_room_for_what_it_takes_besides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    torch.manual_seed(0)
    codes, scales = encode_weight(Quantization.NF4, torch.randn(256, 128))
    flat = torch.randn(32, 128)
    with budget(ram=held_bytes + (400 << 20), page_dir=tmp_path).resizing() as b:
        needed: list[int] = []
        make_free = b.interceptor.residency.make_free
        monkeypatch.setattr(
            b.interceptor.residency, "make_free", lambda nbytes: (needed.append(nbytes), make_free(nbytes))
        )
        torch.ops.port_agent.grid_linear(flat, codes, scales, None, Quantization.NF4.value, torch.float32)
        assert max(needed) > 12 << 20


def test_an_operator_that_fails_may_have_resized_its_result(tmp_path: Path) -> None:
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        x, other = torch.ones(2, 3000), torch.ones(6000)
        with pytest.raises(RuntimeError, match="single memory location"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of the resizing
            torch.cat([x, x], out=x)
        x[2:] = 2.0
        other.mul_(2.0)  # which sends `x` away
        assert (x.shape, x.sum().item()) == ((4, 3000), 18000.0)
