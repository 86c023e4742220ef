"""Intercept the operators of a training program as it runs: the front door of the agent.

The user's Python, autograd and optimizer run unchanged. A dispatch mode sees every ATen operator: before it runs, the
storages that it reads are made resident; afterwards, those needed last are evicted.

Over guarded memory (`port_agent.guard`) tensors keep their addresses, and whoever touches a paged-out one finds it
there. All that the mode does is then advice, and it starts when tensors come near the limit. Without guarded memory,
evicted storages are emptied (`storage.resize_(0)`; tensors stay valid objects), and `patches` guards accesses that
bypass the dispatcher. Values always come from the operator as it is called, never from a record, so nothing can be
stale. Traces of earlier steps only say what is needed when.

Rooms: `budget` is what users import; `dispatch` sees the operators; `residency` knows what is resident and moves
storages with `port_agent.paging`; `tiles` runs operators that do not fit whole; `decisions` says what is evicted when;
`patches` watches the program outside its operators.
"""
