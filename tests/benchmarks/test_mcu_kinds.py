"""The judge of networks: right ones pass, what has no kernel is refused, and another network is found out."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import benchmarks.mcu_kinds as judging
from benchmarks.mcu_kinds import Verdict, judge, markdown
from benchmarks.mcu_networks.kinds import KINDS, NetworkKind, random_kind
from port_planner.mcu import CompiledModel, compile_model

pytestmark = pytest.mark.process


def named(name: str) -> NetworkKind:
    return next(kind for kind in KINDS if kind.name == name)


def test_right_and_refused_networks_are_told_apart() -> None:
    right = [judge(kind) for kind in (named("inception"), named("mlp tanh"), random_kind(3))]
    assert [found.verdict for found in right] == [Verdict.RIGHT] * 3
    refused = judge(named("lstm"))
    assert (refused.verdict, refused.float_error) == (Verdict.REFUSED, None) and "cell" in refused.note
    assert markdown([*right, refused]).startswith("4 networks: 3 right, 1 refused, 0 wrong.")


def test_another_network_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(module: nn.Module, data: np.ndarray, **options: Any) -> CompiledModel:
        changed = copy.deepcopy(module)
        with torch.no_grad():
            changed.get_submodule("2").get_parameter("weight")[0, 0] += 0.3
        return compile_model(changed, data, **options)

    monkeypatch.setattr(judging, "compile_model", other)
    found = judge(named("mlp tanh"))
    assert found.verdict is Verdict.WRONG and found.float_error is not None and found.float_error > 1e-3
