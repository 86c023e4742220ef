"""Fine-tune a language model from ordinary files, with a fixed training loop that `exec` runs inside a budget.

The inputs are a model directory as huggingface_hub leaves it and the user's own text; the result is an adapter that
peft loads, or a model.
"""
