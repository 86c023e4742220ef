"""A fine-tuning as a job of the daemon: its file, its start, and the worker process."""
