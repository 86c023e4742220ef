"""Which of a bundle's plans a job runs, and when they are made again for what its steps really take."""
