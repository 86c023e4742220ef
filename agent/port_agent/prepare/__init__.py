"""From a training script to a bundle that was tried on this device."""
