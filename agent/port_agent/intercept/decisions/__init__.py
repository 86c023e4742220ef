"""What leaves when, and how it comes back.

`trace` remembers what the program did, `eviction` chooses, `recompute` rebuilds. `planner` has the step that repeats
(`step_recording`) planned beside the program and adopts the plan; `kept_plans` keeps it for the next run.
"""
