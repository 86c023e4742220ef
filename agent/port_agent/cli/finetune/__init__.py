"""`finetune`: the command, and the process that trains."""
