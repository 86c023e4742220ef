"""What is evicted when, and how it comes back.

`trace` remembers what the program did, `eviction` chooses, `rematerialization` rebuilds. `step_planner` has the
repeating step (`step_recording`) planned alongside the program and adopts the plan; `kept_plans` keeps it for the next
run.
"""
