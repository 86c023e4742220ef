"""Plans training steps: model + device + budgets -> bundle. Runs anywhere; never imports `port_agent`."""
