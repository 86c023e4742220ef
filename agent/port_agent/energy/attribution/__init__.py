"""Attribute measured energy to the running jobs (`jobs`), and a job's energy to its steps and
their phases (`one_job`).
"""
