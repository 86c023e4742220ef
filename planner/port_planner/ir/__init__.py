"""The language planner and agent both speak: graphs, plans, programs, costs, bundles."""
