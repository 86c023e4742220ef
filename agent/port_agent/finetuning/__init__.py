"""Fine-tune a language model from the files that people have.

A fixed recipe, run inside a budget by `exec`.

A model directory as huggingface_hub leaves it, the user's own text, an adapter that peft loads.
"""
