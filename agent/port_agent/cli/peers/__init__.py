"""Commands about other devices: pairing, the fleet, federated averaging."""
