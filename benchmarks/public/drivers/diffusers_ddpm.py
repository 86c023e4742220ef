"""A small denoising diffusion model of diffusers, trained and sampled with seeds."""

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16, in_channels=1, out_channels=1, block_out_channels=(32, 64), layers_per_block=1,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)  # fmt: skip
average = EMAModel(model.parameters())
schedule = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    pictures, noise, times = torch.randn(8, 1, 16, 16), torch.randn(8, 1, 16, 16), torch.randint(0, 100, (8,))
    loss = torch.nn.functional.mse_loss(model(schedule.add_noise(pictures, noise, times), times).sample, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.step(model.parameters())
    optimizer.zero_grad()
    print(loss.item().hex())
pipeline = DDPMPipeline(model, schedule)
pipeline.set_progress_bar_config(disable=True)
image = pipeline(generator=torch.manual_seed(1), num_inference_steps=3, output_type="np").images
print(float(image.sum()).hex())
model.save_pretrained("unet")
