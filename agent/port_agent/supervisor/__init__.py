"""The daemon: it reads facts, makes one decision, and runs a worker process for each running job.

Never imports torch.
"""
