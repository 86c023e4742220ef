"""What is evicted when, and how it is restored.

`trace` remembers what the program did, `eviction` chooses, `rematerialization` rebuilds. `step_planner`
plans the repeating step (`step_recording`) in parallel with the program and adopts the plan; `kept_plans`
stores it for the next run.
"""
