"""Rounds of federated averaging by Flower's strategies, messages and client apps, in short-lived processes.

Flower (`flwr`, the extra `federate`) runs here without its own network: messages go over the connections of paired
devices. Flower's SuperNode runs code from the server, trusts any name that a public authority vouches for, and takes
265 MB during training. Here no part of a message is run, the other end is known by its certificate, and during training
the worker is the only process.
"""
