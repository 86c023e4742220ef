"""What the devices of a federation say to each other; it travels as questions and answers of `port_agent.peers.exchange`."""
