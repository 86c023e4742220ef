"""What is put in the place of functions of torch and Python while a program is followed.

It is taken away afterwards.

`program`: ends of steps, threads, refusals; `escapes`: what reads past the dispatcher; `dispatch_keys`; `deferred_modules`
and `light_dynamo`: what is loaded when it is used.
"""
