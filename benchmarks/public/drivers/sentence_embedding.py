"""A small sentence transformer, trained with its own trainer on made-up pairs."""

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = [f"w{k}" for k in range(200)]
vocabulary = {word: k for k, word in enumerate(["[PAD]", "[UNK]", *words])}
tokenizer = Tokenizer(token_models.WordLevel(vocabulary, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=64
).save_pretrained("base")
BertModel(
    BertConfig(vocab_size=202, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
).save_pretrained("base")
encoder = models.Transformer("base")
model = SentenceTransformer(modules=[encoder, models.Pooling(128)], device="cpu")
first = [" ".join(words[(k * 7 + j) % 200] for j in range(10)) for k in range(64)]
second = [" ".join(words[(k * 7 + 2 * j) % 200] for j in range(10)) for k in range(64)]
arguments = SentenceTransformerTrainingArguments(
    "out",
    max_steps=6,
    per_device_train_batch_size=16,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    disable_tqdm=True,
)
trainer = SentenceTransformerTrainer(
    model,
    arguments,
    Dataset.from_dict({"anchor": first, "positive": second}),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
print([row["loss"] for row in trainer.state.log_history if "loss" in row])
torch.save(model.state_dict(), "sentences.pt")
