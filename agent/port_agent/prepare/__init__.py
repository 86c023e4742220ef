"""From a training script to a bundle that has been tried on this device."""
