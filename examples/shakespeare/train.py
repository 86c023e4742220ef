"""A character-level transformer on Shakespeare, to be fine-tuned in less than half of plain PyTorch's memory.

An ordinary script, with an ordinary loop, which runs as it is inside a budget:

    python examples/shakespeare/train.py --steps 30 --out checkpoint.pt
    port-agent exec --ram 380M -- examples/shakespeare/train.py --steps 30 --out checkpoint.pt

`port_job()` says the same to the planner, for devices that run no Python code of the user's:

    port-agent plan examples/shakespeare/train.py --ram 380M -o shakespeare.port
    port-agent train shakespeare.port --epochs 1 --out weights.safetensors

Text: Tiny Shakespeare, public domain, from karpathy/char-rnn.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from port_planner.ir.bundle.data_order import batch_rows
from port_planner.job import TrainingJob

LENGTH, WIDTH, LAYERS, HEADS, BATCH = 192, 192, 6, 6, 24


class Block(nn.Module):
    """Pre-norm attention and feed-forward, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, length, width)."""
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(n, t, c)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class CharTransformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, symbols: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (batch, length) -> logits (batch, length, symbols)."""
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def loss_fn(model: nn.Module, ids: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy in nats per character, and the share of characters predicted right."""
    logits = model(ids)
    loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
    return loss, (logits.argmax(-1) == following).float().mean()


def windows(text: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` windows of the text and the same one character on."""
    starts = torch.linspace(0, len(text) - LENGTH - 2, count).long()
    rows = starts[:, None] + torch.arange(LENGTH)
    return text[rows], text[rows + 1]


def port_job() -> TrainingJob:
    """What `port-agent plan` calls: model, loss, optimizer and data."""
    torch.manual_seed(0)
    text = (Path(__file__).parent / "tinyshakespeare.txt").read_text()
    symbols = sorted(set(text))
    codes = torch.tensor([symbols.index(c) for c in text[:400_000]])
    model = CharTransformer(len(symbols))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    return TrainingJob(
        model,
        loss_fn,
        optimizer,
        windows(codes[:360_000], 720),
        BATCH,
        eval_data=windows(codes[360_000:], 48),
        scheduler=scheduler,
        name="shakespeare",
    )


def main() -> None:
    """Train as anybody would, in the order in which a bundle reads its data; print losses, save a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("checkpoint.pt"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = port_job()
    model, optimizer, scheduler = job.model, job.optimizer, job.scheduler
    torch.manual_seed(job.seed)
    batches = batch_rows(job.seed, len(job.data[0]), BATCH, drop_last=job.drop_last)
    for step, (_, rows) in zip(range(arguments.steps), batches, strict=False):
        loss, _ = loss_fn(model, *(column[rows] for column in job.data))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step + 1} loss {loss.item()!r}", flush=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, arguments.out)


if __name__ == "__main__":
    main()
