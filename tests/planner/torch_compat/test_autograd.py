"""What nodes saved, tangents, versions, and the wrappers of torch.func."""

import torch
from torch.autograd import forward_ad

from port_planner.base.errors import program_line
from port_planner.torch_compat.autograd import (
    ASK_WHAT_IS_SAVED,
    ENGINE,
    NODES_THAT_ASK_FOR_MODES,
    LinesOfNodes,
    differs_under_modes,
    forward_differentiating,
    has_gradient_hooks,
    is_batch,
    is_wrapped,
    saved_as_they_were,
    saved_as_used,
    version_of,
)


def test_what_a_node_saved_is_read_as_it_was_and_as_it_is_used() -> None:
    x = torch.randn(3, requires_grad=True)
    node = x.prod().grad_fn
    assert node is not None and node.name() in NODES_THAT_ASK_FOR_MODES.keys() & ASK_WHAT_IS_SAVED
    pointers = {one.data.data_ptr() for one in saved_as_they_were(node) if isinstance(one.data, torch.Tensor)}
    assert x.data_ptr() in pointers
    assert any(isinstance(one, torch.Tensor) and torch.equal(one, x) for one in saved_as_used(node))


def test_a_saved_tensor_that_a_program_packs_says_so() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        node = torch.randn(3, requires_grad=True).prod().grad_fn
    assert node is not None and any(one.unpack_hook is not None for one in saved_as_they_were(node))


def test_a_level_of_forward_differentiation_is_seen() -> None:
    assert not forward_differentiating()
    with forward_ad.dual_level():
        assert forward_differentiating()


def test_the_line_of_a_node_is_known_while_its_formula_runs() -> None:
    lines, found = LinesOfNodes(program_line), list[str]()
    x = torch.ones(2, requires_grad=True)
    here = int(lines.line().rpartition(":")[2])
    y = x.exp()
    lines.note()
    lines.note()
    z = y.sin().cos()
    lines.note()
    ask = eval(
        compile("lambda _: found.append(lines.line())", "<no program>", "eval"), {"found": found, "lines": lines}
    )
    for tensor in (x, y, z):
        tensor.register_hook(ask)
    z.sum().backward()
    assert [line.rpartition(":")[2] for line in found] == [str(here + 5), str(here + 2), ""]


def test_versions_count_writes() -> None:
    x = torch.zeros(2)
    before = version_of(x)
    x.add_(1)
    assert version_of(x) == before + 1


def test_wrappers_are_known() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda t: seen.append(is_wrapped(t)) or t)(torch.ones(2, 2))
    assert seen == [True] and not is_wrapped(torch.ones(2)) and not is_batch(torch.ones(2))


def test_what_torch_func_wraps_takes_the_formula_of_a_mode_anyway() -> None:
    product, filled = (
        torch.ones(2, requires_grad=True).prod().grad_fn,
        torch.ones(2).masked_fill(torch.ones(2) > 0, torch.ones((), requires_grad=True)).grad_fn,
    )
    assert product is not None and filled is not None
    plain, seen = torch.ones(2), list[tuple[bool, bool, bool]]()

    def asked(wrapped: torch.Tensor) -> torch.Tensor:
        seen.append(
            (
                differs_under_modes(product, [plain], [wrapped, None]),
                differs_under_modes(product, [wrapped], [plain]),
                differs_under_modes(filled, [plain], [wrapped]),
            )
        )
        return wrapped

    torch.func.vmap(asked)(torch.ones(3, 2))
    assert seen == [(True, False, False)], "products ask of their operand alone"
    assert differs_under_modes(product, [plain], [plain]) and differs_under_modes(filled, [plain], [plain])


def test_backward_calls_the_engine_by_its_name() -> None:
    assert callable(getattr(torch.autograd, ENGINE))


def test_hooks_on_a_gradient_are_seen_until_they_are_removed() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not has_gradient_hooks(x)
    for register in (x.register_hook, x.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert has_gradient_hooks(x)
        handle.remove()
        assert not has_gradient_hooks(x)
