"""The options of a chat with a model. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`model`, `adapter`: directories. `system`: the system prompt. `most_tokens`: largest
    number of tokens of an answer.

    `greedy`: always choose the likeliest token; otherwise follow the model's generation_config.json, drawing by `seed`.
    """

    model: str
    adapter: str | None = None
    system: str = ""
    most_tokens: int = 512
    greedy: bool = False
    seed: int = 0
