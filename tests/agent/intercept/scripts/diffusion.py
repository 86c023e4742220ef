"""The training loop of diffusers' unconditional example: a UNet, a noise schedule, EMA,
accelerate; argument: its folder.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel


def main(folder: Path) -> None:
    """Train five steps, then sample once from the average and save everything."""
    set_seed(0)
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = UNet2DModel(
        sample_size=16,
        layers_per_block=2,
        block_out_channels=(64, 128, 128),
        norm_num_groups=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )
    ema = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    noise_schedule = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-6)
    rate = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)
    loader = torch.utils.data.DataLoader(torch.rand(24, 3, 16, 16) * 2 - 1, batch_size=4, shuffle=True)
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    for clean in loader:
        noise = torch.randn_like(clean)
        steps = torch.randint(0, 100, (len(clean),))
        with accelerator.accumulate(model):
            predicted = model(noise_schedule.add_noise(clean, noise, steps), steps).sample
            loss = torch.nn.functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
        print(loss.item(), rate.get_last_lr()[0])
    unwrapped = accelerator.unwrap_model(model)
    ema.store(unwrapped.parameters())
    ema.copy_to(unwrapped.parameters())
    pipeline = DDPMPipeline(unet=unwrapped, scheduler=noise_schedule)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder / "pipeline")
    images = pipeline(batch_size=1, num_inference_steps=3, generator=torch.manual_seed(1), output_type="np").images
    print(float(images.sum()))
    ema.restore(unwrapped.parameters())
    accelerator.save_state(str(folder / "state"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
