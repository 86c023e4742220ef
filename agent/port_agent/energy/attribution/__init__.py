"""Attribute measured energy: to the jobs at work (`jobs`), and a job's energy to its steps and their phases (`one_job`)."""
