"""GPT-2 from a small configuration under the Trainer of transformers, with gradient accumulation and checkpoints."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 512, (48, 64))]
arguments = TrainingArguments(
    "out", max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[], logging_steps=1, save_steps=3,
    use_cpu=True, disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=2, eval_strategy="steps", eval_steps=3,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
trainer.train()
print([(row.get("loss"), row.get("eval_loss"), row.get("grad_norm")) for row in trainer.state.log_history])
torch.save(model.state_dict(), "trained.pt")
