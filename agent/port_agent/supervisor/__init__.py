"""The daemon: facts in, one decision, a worker process per running job. Never imports torch."""
