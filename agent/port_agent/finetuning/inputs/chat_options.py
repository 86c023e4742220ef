"""What a conversation with a model is asked to be. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`model`, `adapter`: directories. `system`: what a conversation begins with. `most_tokens`: of an answer.

    `greedy`: the likeliest token each time, else as the model's generation_config.json has it, drawn by `seed`.
    """

    model: str
    adapter: str | None = None
    system: str = ""
    most_tokens: int = 512
    greedy: bool = False
    seed: int = 0
