"""What a supervisor and a worker process say to each other, and how a worker is started."""
