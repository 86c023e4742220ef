"""A language model's directory as people have it, so small that it is made in a moment."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "to be or not to be that is the question whether tis nobler in the mind to suffer\n"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_model(folder: Path, hidden_size: int = 32) -> Path:
    """Write configuration, weights and tokenizer to `folder` and return it."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_data(path: Path) -> Path:
    """Write a record of each kind, several times, and two broken lines; return the path."""
    records = [
        {"text": TEXT},
        {"prompt": "to be or", "completion": " not to be"},
        {
            "messages": [
                {"role": "user", "content": "to be or"},
                {"role": "assistant", "content": "that is the question"},
            ]
        },
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records * 4) + "{broken\n[1]\n")
    return path
