"""The one home of torch's private parts: each with its reason, what breaks without it, and a probe.

`modes`: dispatch modes, keys and kernels; `autograd`; `tensors`: tensors and their storages; `optimizers`; `devices`; `loading`:
what torch imports, and how it is kept from that (needs no torch itself); `probes` looks for all of them in the torch that is there.
What a later torch may add is compared with `decided/` and the tables of these modules; where it differs, a test demands a decision.
Nothing else in the product touches a private name of torch, but for an operator's `_schema` (`tests/test_torch_private.py`).
"""
