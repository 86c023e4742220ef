"""Commands about other devices: pairing, the fleet and federated averaging."""
