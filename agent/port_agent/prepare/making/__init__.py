"""Making a bundle: costs of the device, plans, a dry run of each, and what it teaches for the next."""
