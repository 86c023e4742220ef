"""Training on an attached microcontroller: project, trainer, worker."""
