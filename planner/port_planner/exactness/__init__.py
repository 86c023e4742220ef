"""Whether a part, or another order of work, has the bits of the whole: seen on this machine before it is used.

That depends on the kernels of a processor, of a version of torch, of a number of threads and of the settings of the
arithmetic. So each form of call is run both ways on numbers that show a difference (`cancelling`, `stand_ins`,
`vector_ends`): tiles beside the whole operator (`tiles`), rewritten operators of a graph beside the original
(`replacements`, in a process of its own: `request`). What was found is kept for the next process (`kept_answers`), by form
and `arithmetic`.
"""
