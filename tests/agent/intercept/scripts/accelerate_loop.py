"""accelerate: accumulation, bf16, two data loaders, gathered metrics, its own checkpoint,
resumed; argument: its folder.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(folder: Path) -> None:
    """Train, save the state half-way, load it, and go on."""
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=3, mixed_precision="bf16", cpu=True)
    layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Linear(24, 192), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(192, 24)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    rows = torch.randn(96, 48, 24)
    training = DataLoader(TensorDataset(rows[:72], rows[:72].roll(1, 1)), batch_size=8, shuffle=True)
    held_out = DataLoader(TensorDataset(rows[72:], rows[72:].roll(1, 1)), batch_size=8)
    model, optimizer, training, held_out, schedule = accelerator.prepare(model, optimizer, training, held_out, schedule)
    for epoch in range(2):
        model.train()
        for x, y in training:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(model.parameters(), 0.1)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            print(epoch, loss.item())
        accelerator.save_state(str(folder / f"state{epoch}"))
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(nn.functional.mse_loss(model(x), y)) for x, y in held_out]
        print(epoch, torch.stack(losses).mean().item())
        if epoch == 0:
            accelerator.load_state(str(folder / "state0"))
    accelerator.save_model(model, str(folder / "model"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
