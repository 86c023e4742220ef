"""A LightningModule under Lightning's Trainer, with validation, a checkpoint and early stopping."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    """An autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("held_out", nn.functional.mse_loss(self.net(batch[0]), batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
rows = TensorDataset(torch.randn(128, 256))
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    deterministic=True,
    callbacks=[EarlyStopping("held_out"), ModelCheckpoint("checkpoints", filename="last")],
)
module = Module()
trainer.fit(module, DataLoader(rows, 32, shuffle=True), DataLoader(rows, 32))
print(trainer.callback_metrics["held_out"].item().hex())
torch.save(module.state_dict(), "lightning.pt")
