"""Intercept the operators of a training program while it runs: the entrance to the agent.

The user's Python, autograd and optimizer run unchanged. A dispatch mode sees every ATen operator: before it runs, the
storages that it reads are made resident; afterwards, those needed last are evicted.

In guarded memory (`port_agent.guard`) tensors keep their addresses, and code that touches a paged-out tensor finds it
there. The mode is then only advice, and it starts when tensors come near the limit. Without guarded memory, evicted
storages are emptied (`storage.resize_(0)`; tensors stay valid objects), and `patches` guards accesses that bypass the
dispatcher. Values always come from the operator as it is called, never from a record, so nothing can be stale. Traces
of earlier steps only predict what is needed when.

Rooms: users import `budget`; `dispatch` sees the operators; `residency` knows what is resident and moves storages with
`port_agent.paging`. `tiles` runs operators that do not fit whole; `decisions` chooses what is evicted when; `patches`
watches the program outside its operators.
"""
