"""Whether the device may train now: one pure decision, and the config file that controls it."""
