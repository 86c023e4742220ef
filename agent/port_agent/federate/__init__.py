"""Rounds of federated averaging, by Flower's strategies, messages and client apps, in processes that live for seconds.

Flower (`flwr`, the extra `federate`) runs here without its own network: messages go over the connections of paired devices.
Its SuperNode runs code from the server, trusts any name that a public authority vouches for, and takes 265 MB alongside
the training; here no part of a message is run, the other end is known by its certificate, and while a device trains, the worker is
the only process.
"""
