"""A bundle in the making: costs of the device, plans for them, a trial of each, and what it teaches for the next."""
