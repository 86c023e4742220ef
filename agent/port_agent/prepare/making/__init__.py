"""Making a bundle: costs of the device, plans, a dry run of each, and what the next plan learns from it."""
