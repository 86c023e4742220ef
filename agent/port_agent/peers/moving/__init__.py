"""What two paired devices say to each other about a job that moves; it travels as questions and answers of `port_agent.peers.exchange`."""
