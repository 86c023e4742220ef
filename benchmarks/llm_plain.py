"""`finetune`'s recipe in plain PyTorch, for `benchmarks.llm`: `python -m benchmarks.llm_plain OPTIONS [checkpointing]`.

OPTIONS as JSON. It prints the recipe's events as lines of JSON, and at the end the peak of resident memory.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec

from port_agent.finetuning import trained_model as base
from port_agent.finetuning import training
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_planner.base.process_memory import peak_resident_bytes


def main() -> None:
    """Train; see the module's docstring."""
    options = msgspec.json.decode(sys.argv[1], type=FinetuneOptions)
    if sys.argv[2:] == ["checkpointing"]:

        def load_model(*args: Any) -> Any:
            model = base.load_model(*args)
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
            return model

        setattr(training, "load_model", load_model)  # noqa: B010  (the recipe, but for the model that it loads)
    training.finetune(options, lambda update: print(json.dumps(asdict(update))), lambda text: None)
    print(json.dumps({"peak_resident_bytes": peak_resident_bytes()}))


if __name__ == "__main__":
    main()
