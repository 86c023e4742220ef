"""What happens to each tensor of a board's training step between two uses: kept, or computed again; whole, or in bands.

The same planner as for computers: `board_problem` states stages and tensors, `port_planner.search` solves, `port_planner.problem.replay`
judges, `choose` lowers what was found to a step table and places its residencies in the arena.
"""
