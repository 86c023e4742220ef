"""What measured energy was spent on: shared among the jobs at work (`jobs`), a job's among its steps and their phases (`one_job`)."""
