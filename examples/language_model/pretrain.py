"""An ordinary script: a small Llama learns to write from a text, from scratch, with a tokenizer of its own.

`python pretrain.py TEXT DIRECTORY --updates 300` leaves a model directory as one downloads it. It knows of no budget.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS, TOKENS, ROWS = 1024, 96, 8


def learned_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer learned from the text."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.train_from_iterator([text], trainers.BpeTrainer(vocab_size=WORDS, special_tokens=["<s>", "</s>"]))
    return PreTrainedTokenizerFast(tokenizer_object=pieces, bos_token="<s>", eos_token="</s>")


def main() -> None:
    """Train and save; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--updates", type=int, default=300)
    arguments = parser.parse_args()
    text = arguments.text.read_text()
    tokenizer = learned_tokenizer(text)
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=arguments.updates)
    for update in range(1, arguments.updates + 1):
        starts = torch.randint(0, len(tokens) - TOKENS, (ROWS,))
        batch = torch.stack([tokens[s : s + TOKENS] for s in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if update % 20 == 0 or update == arguments.updates:
            print(f"update {update} of {arguments.updates}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(arguments.directory)
    tokenizer.save_pretrained(arguments.directory)


if __name__ == "__main__":
    main()
