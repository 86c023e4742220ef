"""Lightning: a module with manual-free training, validation, clipping, accumulation and
checkpoints; argument: its folder.
"""

import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """A convolutional classifier."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU(), nn.Conv2d(width, width * 2, 3, 2, 1),
            nn.BatchNorm2d(width * 2), nn.GELU(), nn.Conv2d(width * 2, width * 4, 3, 2, 1), nn.GELU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(width * 64, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss."""
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.1)
        self.log("loss", loss)
        print(index, loss.item())
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        """Log the loss."""
        self.log("held_out", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), on_epoch=True)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW with a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)}


def main(folder: Path) -> None:
    """Fit two epochs, resume for a third."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    rows = TensorDataset(torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    held_out = TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,)))
    for epochs, resume in ((2, None), (3, folder / "kept" / "last.ckpt")):
        keep = ModelCheckpoint(folder / "kept", monitor="held_out", save_last=True, filename="{epoch}")
        trainer = lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            callbacks=[keep],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
            default_root_dir=folder,
        )
        trainer.fit(
            Classifier(),
            DataLoader(rows, 16, shuffle=True),
            DataLoader(held_out, 16),
            ckpt_path=resume,
            weights_only=False,
        )
        print(sorted((k, v.item()) for k, v in trainer.callback_metrics.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
