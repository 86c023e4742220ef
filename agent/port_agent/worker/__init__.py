"""The protocol between supervisor and worker process, and how a worker is started."""
