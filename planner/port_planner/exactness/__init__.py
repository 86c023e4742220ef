"""Checks on this machine whether parts, or another order of work, give the bits of the whole,
before a plan relies on it.

That depends on the processor, the version of torch, the number of threads and the settings of the arithmetic. So each
form of call runs both ways on numbers that reveal a difference (`cancelling`, `stand_ins`, `vector_ends`). Tiles are
compared with the whole operator (`tiles`), and rewritten operators of a graph with the original (`replacements`, in a
separate process: `request`). Results are stored for later processes (`kept_answers`), by form and `applied_arithmetic`.
"""
