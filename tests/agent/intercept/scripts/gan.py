"""A GAN with two optimizers, detached fakes, spectral norm and an average of the generator; argument: its folder."""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def main(folder: Path) -> None:
    """Train generator and discriminator in turns; save both, the average and some samples."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = nn.Sequential(
        nn.ConvTranspose2d(64, 256, 4), nn.BatchNorm2d(256), nn.ReLU(True),
        nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU(True),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        spectral_norm(nn.Conv2d(3, 64, 4, 2, 1)),
        nn.LeakyReLU(0.2, True),
        spectral_norm(nn.Conv2d(64, 128, 4, 2, 1)),
        nn.LeakyReLU(0.2, True),
        spectral_norm(nn.Conv2d(128, 256, 4, 2, 1)),
        nn.LeakyReLU(0.2, True),
        nn.Conv2d(256, 1, 4),
        nn.Flatten(0),
    )
    average = copy.deepcopy(generator)
    make, judge = (torch.optim.Adam(net.parameters(), 2e-4, (0.5, 0.999)) for net in (generator, discriminator))
    score = nn.functional.binary_cross_entropy_with_logits
    noise = torch.randn(4, 64, 1, 1)
    for step in range(5):
        real, fake = torch.randn(24, 3, 32, 32).tanh(), generator(torch.randn(24, 64, 1, 1))
        judged, forged = discriminator(real), discriminator(fake.detach())
        judged_loss = score(judged, torch.ones_like(judged)) + score(forged, torch.zeros_like(forged))
        judge.zero_grad()
        judged_loss.backward()
        judge.step()
        forged = discriminator(fake)
        made_loss = score(forged, torch.ones_like(forged))
        make.zero_grad()
        made_loss.backward()
        make.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), generator.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        print(step, judged_loss.item(), made_loss.item())
    average.eval()
    with torch.no_grad():
        torch.save(average(noise), folder / "samples.pt")
    nets = {"generator": generator, "discriminator": discriminator, "average": average}
    torch.save({name: net.state_dict() for name, net in nets.items()}, folder / "nets.pt")
    torch.save([make.state_dict(), judge.state_dict()], folder / "optimizers.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
