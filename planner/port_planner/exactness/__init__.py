"""Checks on this machine whether a part, or another order of work, gives the bits of the whole, before a plan uses it.

That depends on the kernels of a processor, of a version of torch, of a number of threads and of the settings of the
arithmetic. So each form of call runs both ways on numbers that reveal a difference (`cancelling`, `stand_ins`,
`vector_ends`): tiles alongside the whole operator (`tiles`), rewritten operators of a graph alongside the original
(`replacements`, in a separate process: `request`). Results are kept for later processes (`kept_answers`), by form and
`arithmetic`.
"""
