"""The only place that uses torch's private parts: each with its reason, what breaks without it, and a probe.

`modes`: dispatch modes, keys and kernels; `autograd`; `tensors`: tensors and their storages; `optimizers`; `devices`;
`loading`: what torch imports, and how that is avoided (needs no torch itself); `probes` checks all of them in the
installed torch. Additions of a later torch are compared with `decided/` and the tables of these modules; for a
difference, a test demands a decision. Nothing else in the product uses a private name of torch, except an operator's
`_schema` (`tests/test_torch_private.py`).
"""
