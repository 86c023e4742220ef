"""What runs in processes that have the simulated card (`tests/simulated_card.py`): functions for `tests.forked.run_forked`."""

import ctypes
import json
import os
import sys
from typing import Any

import torch

from tests.simulated_card import NAME, UNIFIED, card


def trained(device: str) -> list[str]:
    """Return the bits of losses: convolution, norms, dropout, attention, embedding, AdamW."""
    torch.manual_seed(0)
    stem = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(2)
    )
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    places, head = torch.nn.Embedding(8, 64), torch.nn.Linear(512, 10)
    model = torch.nn.ModuleList([stem, layer, places, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(3):
        x, y = torch.randn(16, 3, 8, 8).to(device), torch.randint(0, 10, (16,)).to(device)
        hidden = layer(stem(x) + places(torch.arange(8).to(device)))
        loss = torch.nn.functional.cross_entropy(head(hidden.flatten(1)), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.item()).hex())
    return losses


def computes_as_the_cpu(_: list[str]) -> int:
    """Say what training gives on both, what is left of it, and which order was violated."""
    there = card()
    on_cpu, on_card = trained("cpu"), trained(NAME)
    return _say({"cpu": on_cpu, "card": on_card, "left": there.card_allocated(), "races": there.card_races()})


def memory_is_unkind(_: list[str]) -> int:
    """Say what becomes of memory that is resized, freed, beyond the cap."""
    there = card()
    x = torch.arange(1000.0, device=NAME)
    kept, memory = x.cpu(), x.untyped_storage()
    memory.resize_(0)
    emptied = there.card_allocated()
    memory.resize_(4000)
    garbage = bool((x.cpu() == kept).any())
    x.copy_(kept)
    y = torch.zeros(0, device=NAME)
    torch.add(x, x, out=y)
    there.card_cap(1 << 20)
    try:
        torch.empty(1 << 20, device=NAME)
        refused = ""
    except torch.OutOfMemoryError as error:
        refused = str(error)
    longer = torch.equal(y.cpu(), 2 * kept)
    return _say({"emptied": emptied, "garbage": garbage, "refused": refused, "longer": longer})


def order_is_needed(_: list[str]) -> int:
    """Say what copies on another stream bring, with and without each wait."""
    there = card()
    found = {}
    for name in ("all waits", "not for the source", "not for the copy", "freed early"):
        races, right = there.card_races(), torch.full((1000,), 3.0)
        x, pinned = torch.ones(1000, device=NAME), torch.empty(1000, pin_memory=True)
        x += 2
        copies, computed = torch.Stream(device=NAME), torch.accelerator.current_stream().record_event()
        with copies:
            if name != "not for the source":
                copies.wait_event(computed)
            pinned.copy_(x, non_blocking=True)
            done = copies.record_event()
        if name == "freed early":
            x.untyped_storage().resize_(0)
        if name != "not for the copy":
            done.synchronize()
        found[name] = [torch.equal(pinned, right), there.card_races() - races]
    return _say(found)


def other_streams_wait(_: list[str]) -> int:
    """Say what an operator reads of a copy to the card that it did not wait for, and after it has."""
    there = card()
    pinned, x = torch.ones(1000, pin_memory=True), torch.empty(1000, device=NAME)
    copies, computing = torch.Stream(device=NAME), torch.accelerator.current_stream()
    copies.wait_event(computing.record_event())
    with copies:
        x.copy_(pinned, non_blocking=True)
        done = copies.record_event()
    early = torch.equal((x + 1).cpu(), torch.full((1000,), 2.0))
    computing.wait_event(done)
    return _say(
        {"early": early, "late": torch.equal((x + 1).cpu(), torch.full((1000,), 2.0)), "races": there.card_races()}
    )


def host_touches_it(_: list[str]) -> int:
    """Read the card's memory from the host; the kernel ends who may not."""
    card()
    x = torch.ones(1000, device=NAME)
    return _say({"unified": bool(os.environ.get(UNIFIED)), "read": ctypes.c_float.from_address(x.data_ptr()).value})


def _say(facts: dict[str, Any]) -> int:
    sys.stdout.write(json.dumps(facts))
    return 0
