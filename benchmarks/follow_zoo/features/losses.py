"""Loss functions of torch.nn: one program each."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.follow_zoo.features.registry import CLASSES, ROWS, Features, learn, perceptron, rows, targets

FEATURES = Features("losses")

_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy_weights_smoothing": lambda x: nn.CrossEntropyLoss(torch.rand(CLASSES), label_smoothing=0.1)(
        x, targets()
    ),
    "cross_entropy_ignored": lambda x: nn.CrossEntropyLoss(ignore_index=0)(x, targets()),
    "cross_entropy_probabilities": lambda x: nn.CrossEntropyLoss()(x, torch.rand(ROWS, CLASSES).softmax(1)),
    "nll": lambda x: nn.NLLLoss()(x.log_softmax(1), targets()),
    "mse": lambda x: nn.MSELoss()(x, torch.randn(ROWS, CLASSES)),
    "l1": lambda x: nn.L1Loss()(x, torch.randn(ROWS, CLASSES)),
    "smooth_l1": lambda x: nn.SmoothL1Loss()(x, torch.randn(ROWS, CLASSES)),
    "huber": lambda x: nn.HuberLoss()(x, torch.randn(ROWS, CLASSES)),
    "kl_div": lambda x: nn.KLDivLoss(reduction="batchmean")(x.log_softmax(1), torch.rand(ROWS, CLASSES).softmax(1)),
    "bce": lambda x: nn.BCELoss()(x.sigmoid(), torch.rand(ROWS, CLASSES)),
    "bce_with_logits": lambda x: nn.BCEWithLogitsLoss(pos_weight=torch.rand(CLASSES))(x, torch.rand(ROWS, CLASSES)),
    "poisson_nll": lambda x: nn.PoissonNLLLoss()(x, torch.rand(ROWS, CLASSES)),
    "gaussian_nll": lambda x: nn.GaussianNLLLoss()(x, torch.randn(ROWS, CLASSES), x.exp()),
    "hinge_embedding": lambda x: nn.HingeEmbeddingLoss()(x, torch.randint(0, 2, (ROWS, CLASSES)) * 2 - 1),
    "margin_ranking": lambda x: nn.MarginRankingLoss()(x[:, 0], x[:, 1], torch.ones(ROWS)),
    "multi_margin": lambda x: nn.MultiMarginLoss()(x, targets()),
    "multilabel_margin": lambda x: nn.MultiLabelMarginLoss()(x, torch.randint(0, CLASSES, (ROWS, CLASSES))),
    "multilabel_soft_margin": lambda x: nn.MultiLabelSoftMarginLoss()(x, torch.rand(ROWS, CLASSES).round()),
    "soft_margin": lambda x: nn.SoftMarginLoss()(x, torch.ones(ROWS, CLASSES)),
    "triplet_margin": lambda x: nn.TripletMarginLoss()(x[:5], x[5:10], x[10:15]),
    "cosine_embedding": lambda x: nn.CosineEmbeddingLoss()(x[:8], x[8:], torch.ones(8)),
    "ctc": lambda x: nn.CTCLoss()(
        x.view(8, 2, CLASSES).log_softmax(2),
        torch.randint(1, CLASSES, (2, 3)),
        torch.tensor([8, 6]),
        torch.tensor([3, 2]),
    ),
}


def _descends(loss: Callable[[Tensor], Tensor]) -> Any:
    return learn(perceptron(), lambda model: loss(model(rows())))


for _name, _loss in _LOSSES.items():
    FEATURES.named(_name, partial(_descends, _loss))


@FEATURES.add
def adaptive_log_softmax() -> Any:
    model = nn.ModuleList([nn.Linear(32, 32), nn.AdaptiveLogSoftmaxWithLoss(32, 200, [20, 80])])
    return learn(model, lambda m: m[1](m[0](rows()), torch.randint(0, 200, (ROWS,))).loss)


@FEATURES.add
def reduction_none_weighted_rows() -> Any:
    return learn(
        perceptron(),
        lambda m: (nn.functional.cross_entropy(m(rows()), targets(), reduction="none") * torch.rand(ROWS)).sum(),
    )


@FEATURES.add
def contrastive_pairs() -> Any:
    def loss(model: nn.Module) -> Tensor:
        one, other = (nn.functional.normalize(model(rows()), dim=1) for _ in range(2))
        return nn.functional.cross_entropy(one @ other.T / 0.1, torch.arange(ROWS))

    return learn(perceptron(), loss)


@FEATURES.add
def distillation() -> Any:
    teacher = perceptron().eval()

    def loss(model: nn.Module) -> Tensor:
        x = rows()
        with torch.no_grad():
            said = teacher(x).softmax(1)
        return nn.functional.kl_div(model(x).log_softmax(1), said, reduction="batchmean")

    return learn(perceptron(), loss)
