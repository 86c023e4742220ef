"""What lasts from step to step: weights and optimizer state, their initial values, whether they are finite, and their
commits.
"""
