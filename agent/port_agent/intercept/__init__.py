"""Follow a training program as it runs: the front door of the agent.

The user's Python, autograd and optimizer run as they are. A dispatch mode sees every ATen operator: before it runs, the
storages that it reads are made resident, after it those needed last leave. Over guarded memory (`port_agent.guard`) they keep
their addresses, and whoever touches one that is away finds it there: all that the mode does is advice, and it is on from where
tensors come near to the limit. In a process without it storages are emptied (`storage.resize_(0)`: tensors stay valid
objects), and `patches` guards what passes by the dispatcher. Values come from the operator as it is called, never from a record, so nothing can be stale; traces of earlier
steps only say what is needed when, and all that hangs on them is advice.

Rooms: `budget` is what users import; `dispatch` sees the operators; `residency` knows what is resident and moves storages, to
`port_agent.paging`; `tiles` runs operators that do not fit whole; `decisions` says what leaves when; `patches` watches the
program beside its operators.
"""
