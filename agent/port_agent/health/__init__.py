"""What is wrong with this device, since when, and what helps."""
