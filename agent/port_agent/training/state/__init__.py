"""The state that outlives a step: weights and optimizer state, their initial values, whether they are
finite, and their commits.
"""
