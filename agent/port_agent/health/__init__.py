"""What is wrong with this device, since when, and how to fix it."""
