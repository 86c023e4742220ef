"""Choose the device on which each operator of a step runs, within the memories there."""
