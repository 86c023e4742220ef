"""What the public programs use of torchvision, over made-up pictures: its wheels are made for
one version of torch each.
"""

from torchvision import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
