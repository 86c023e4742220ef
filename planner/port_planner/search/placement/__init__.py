"""On which device each operator of a step runs, and what memories have room for there."""
