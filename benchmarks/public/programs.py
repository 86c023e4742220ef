"""What is run: scripts of public repositories, and programs around the training code of public
libraries, over small made-up data.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MNIST = ("--epochs", "1", "--save-model", "--test-batch-size", "64")
_LANGUAGE = ("--epochs", "1", "--emsize", "128", "--nhid", "128", "--nhead", "2")
_NANOGPT = (
    "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=1", "--eval_interval=4", "--log_interval=1",
    "--block_size=32", "--batch_size=4", "--n_layer=2", "--n_head=2", "--n_embd=128", "--max_iters=4", "--lr_decay_iters=4",
)  # fmt: skip


def nothing(folder: Path) -> None:
    """Make no data."""


def _text(path: Path, words: int) -> None:
    drawn = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        " ".join(drawn.choice(("to", "be", "or", "not", "that", "is", "O", "God", "!", ",")) for _ in range(12))
        for _ in range(words // 12)
    )
    path.write_text("O God, O God!\n" + "\n".join(lines) + "\n")


def _language(folder: Path) -> None:
    for part in ("train", "valid", "test"):
        _text(folder / f"data/wikitext-2/{part}.txt", 3000)


def _cora(folder: Path) -> None:
    """A graph of papers as GAT reads it, so that it fetches none."""
    drawn, kinds = random.Random(0), ("Theory", "Case_Based", "Neural_Networks")
    place = folder / "cora"
    place.mkdir()
    rows = (
        f"{k}\t" + "\t".join(str(drawn.randint(0, 1)) for _ in range(40)) + f"\t{kinds[k % 3]}" for k in range(1700)
    )
    (place / "cora.content").write_text("\n".join(rows) + "\n")
    (place / "cora.cites").write_text("".join(f"{k}\t{drawn.randrange(1700)}\n" for k in range(1700)))


@dataclass(frozen=True, slots=True)
class PublicProgram:
    """One program. `folder` is copied from the checkout `repository`, or is one of our drivers where that is empty."""

    name: str
    repository: str
    folder: str
    words: tuple[str, ...]
    prepare: Callable[[Path], None] = nothing


def _example(name: str, folder: str, *words: str, prepare: Callable[[Path], None] = nothing) -> PublicProgram:
    return PublicProgram(name, "examples", folder, words, prepare)


def _driver(name: str, script: str) -> PublicProgram:
    return PublicProgram(name, "", script, (f"{script}.py",))


PROGRAMS = (
    _example("mnist", "mnist", "main.py", *_MNIST),
    _example("mnist_rnn", "mnist_rnn", "main.py", *_MNIST),
    _example("mnist_forward_forward", "mnist_forward_forward", "main.py", "--epochs", "2", "--train_size", "512", "--test_size", "128", "--save-model"),
    _example("mnist_hogwild, 1 process", "mnist_hogwild", "main.py", "--epochs", "1", "--num-processes", "1", "--save_model"),
    _example("vae", "vae", "main.py", "--epochs", "1", prepare=lambda folder: (folder / "results").mkdir(exist_ok=True)),
    _example("dcgan", "dcgan", "main.py", "--dataset", "fake", "--niter", "1", "--ngf", "16", "--ndf", "16", "--batchSize", "8", "--workers", "0", "--manualSeed", "1"),
    _example("regression, seeded, 200 rounds", "regression", "run_seeded.py", "main.py", "200"),
    _example("gat", "gat", "main.py", "--epochs", "4", "--val-every", "1", "--no-accel", "--num-heads", "2", "--hidden-dim", "16", prepare=_cora),
    _example("reinforce, 20 episodes", "reinforcement_learning", "run_seeded.py", "reinforce.py", "20"),
    _example("actor_critic, 20 episodes", "reinforcement_learning", "run_seeded.py", "actor_critic.py", "20"),
    _example("word_language_model, LSTM", "word_language_model", "main.py", *_LANGUAGE, prepare=_language),
    _example("word_language_model, GRU tied", "word_language_model", "main.py", *_LANGUAGE, "--model", "GRU", "--tied", prepare=_language),
    _example("word_language_model, RNN, AdamW", "word_language_model", "main.py", *_LANGUAGE, "--model", "RNN_TANH", "--use-optimizer", "--lr", "0.01", prepare=_language),
    _example("word_language_model, Transformer", "word_language_model", "main.py", *_LANGUAGE, "--model", "Transformer", "--lr", "5", prepare=_language),
    PublicProgram("minGPT adder", "minGPT", ".", ("projects/adder/adder.py", "--trainer.max_iters=12", "--trainer.num_workers=0")),
    PublicProgram("minGPT chargpt", "minGPT", ".", ("projects/chargpt/chargpt.py", "--trainer.max_iters=6", "--trainer.num_workers=0", "--trainer.batch_size=8", "--model.model_type=gpt-nano"), lambda folder: _text(folder / "input.txt", 5000)),
    PublicProgram("nanoGPT", "nanoGPT", ".", ("train.py", *_NANOGPT), lambda folder: _nanogpt(folder)),
    _driver("skorch in scikit-learn's grid search", "skorch_net"),
    _driver("e3nn", "e3nn_tetris"),
    _driver("torchdiffeq, with its adjoint", "torchdiffeq_ode"),
    _driver("stable-baselines3, PPO and DQN", "sb3_ppo"),
    _driver("opacus", "opacus_dp"),
    _driver("pytorch-metric-learning", "metric_learning"),
    _driver("sentence-transformers", "sentence_embedding"),
    _driver("diffusers, DDPM and its pipeline", "diffusers_ddpm"),
    _driver("lightning", "lightning_module"),
    _driver("transformers' Trainer", "transformers_trainer"),
    _driver("accelerate", "accelerate_loop"),
)  # fmt: skip


def _nanogpt(folder: Path) -> None:
    """Write what its `prepare.py` writes, of a made-up text."""
    import pickle

    import numpy as np

    place = folder / "data/shakespeare_char"
    _text(place / "input.txt", 6000)
    text = (place / "input.txt").read_text()
    letters = sorted(set(text))
    numbers = np.array([letters.index(letter) for letter in text], dtype=np.uint16)
    numbers[:-2000].tofile(place / "train.bin")
    numbers[-2000:].tofile(place / "val.bin")
    meta = {
        "vocab_size": len(letters),
        "itos": dict(enumerate(letters)),
        "stoi": {letter: k for k, letter in enumerate(letters)},
    }
    (place / "meta.pkl").write_bytes(pickle.dumps(meta))
