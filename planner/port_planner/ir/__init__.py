"""The data that planner and agent exchange: graphs, plans, programs, costs, bundles."""
