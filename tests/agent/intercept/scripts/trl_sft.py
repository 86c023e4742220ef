"""trl's SFTTrainer on a small Llama with a LoRA adapter and gradient checkpointing; argument: its folder."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

SENTENCES = [
    f"the {who} of {where} {does} a number, {n} times"
    for n, (who, where, does) in enumerate(
        (who, where, does)
        for who in ("king", "clerk", "owl", "fish")
        for where in ("Norway", "the sea", "winter", "paper")
        for does in ("counts", "forgets", "writes")
    )
]


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words in SENTENCES."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    tokenizer.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def main(folder: Path) -> None:
    """Train six steps with evaluation and a checkpoint, then save the adapter."""
    set_seed(0)
    torch.set_num_threads(1)
    tokenizer = words()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=max(len(tokenizer), 2048),
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
    arguments = SFTConfig(
        str(folder / "run"), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_length=64,
        logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3, report_to=[], use_cpu=True, bf16=False,
        learning_rate=1e-3, gradient_checkpointing=True, disable_tqdm=True, seed=1, dataset_num_proc=None,
    )  # fmt: skip
    rows = Dataset.from_dict({"text": SENTENCES})
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=rows.select(range(40)),
        eval_dataset=rows.select(range(40, 48)),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"),
    )
    trainer.train()
    trainer.save_model(str(folder / "adapter"))
    timed = ("runtime", "per_second")
    for entry in trainer.state.log_history:
        print({k: v for k, v in entry.items() if not any(word in k for word in timed)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
