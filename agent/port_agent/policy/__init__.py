"""May the device train now? One pure decision, and the config file that steers it."""
