"""Scripts that say what to train, and scripts that do not."""

import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.column_file import ColumnFile
from port_planner.job import JobError, ScriptError, TrainingJob
from port_planner.job_sources import as_job, load_job
from port_planner.make_bundle import prepare
from port_planner.script_loading import imports_kept

GOOD = """
from port_planner.job import TrainingJob
import beside
def port_job():
    return TrainingJob(model=None, loss_fn=beside.loss, optimizer=None, data=[], batch_size=4{more})
"""


@pytest.fixture(autouse=True)
def as_before(tmp_path: Path) -> Iterator[None]:
    """Forget the modules and the path of the scripts."""
    with imports_kept():
        yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def script(folder: Path, text: str, name: str = "my_training.py") -> Path:
    (folder / "beside.py").write_text("def loss(): pass\n")
    (folder / name).write_text(text)
    return folder / name


def test_a_script_imports_what_lies_beside_it_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, GOOD.format(more=""))
    monkeypatch.chdir(tmp_path)
    job = load_job(Path("my_training.py"))
    assert job.batch_size == 4 and job.loss_fn.__module__ == "beside"
    monkeypatch.chdir("/")
    assert str(tmp_path) in sys.path, "what it imports later is found from any directory"


@pytest.mark.parametrize(("more", "name"), [("", "my_training"), (', name="birds"', "birds")])
def test_a_job_without_a_name_is_called_as_its_script(tmp_path: Path, more: str, name: str) -> None:
    assert load_job(script(tmp_path, GOOD.format(more=more))).name == name


def test_classes_of_a_script_can_be_copied_and_pickled(tmp_path: Path) -> None:
    """A copy for the reference losses finds the class by its module's name."""
    loaded = load_job(script(tmp_path, GOOD.format(more=", name=Model()") + "class Model: pass\n"))
    assert isinstance(pickle.loads(pickle.dumps(loaded.name)), type(loaded.name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"my_training.py has no function port_job\(\); add one that returns port_planner.job.TrainingJob"),
        (
            "port_job = lambda: None",
            r"port_job\(\) in .*my_training.py returned NoneType; it must return a port_planner.job",
        ),
        ("def port_job(): return [1]", r"returned list"),
    ],
)
def test_a_script_that_does_not_say_what_to_train(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_job(script(tmp_path, text))


def test_a_path_that_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"none.py does not exist; write a script with a function port_job\(\)"):
        load_job(tmp_path / "none.py")
    with pytest.raises(JobError, match="does not exist"):
        load_job(tmp_path)
    with pytest.raises(JobError, match=r"notes.txt is not a Python file; give a script that ends in .py"):
        load_job(script(tmp_path, "", "notes.txt"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("import no_such_thing", ["line 1, in <module>", "import no_such_thing", "ModuleNotFoundError"]),
        (
            "def port_job():\n    return 1 / zero()\ndef zero():\n    return {}['x']",
            ["line 2, in port_job", "line 4, in zero", "KeyError: 'x'"],
        ),
        ("def port_job(:", ["line 1", "SyntaxError"]),
        ("import json\njson.loads('{')", ["json.loads('{')", "JSONDecodeError"]),
    ],
)
def test_what_the_script_itself_raises_is_shown_with_its_own_lines(tmp_path: Path, text: str, shown: list[str]) -> None:
    with pytest.raises(ScriptError) as caught:
        load_job(script(tmp_path, text))
    message = str(caught.value)
    assert caught.value.exit_code == 2 and all(words in message for words in shown), message
    assert "port_planner" not in message and "importlib" not in message and "decoder.py" not in message


def test_a_script_reads_its_own_arguments_which_are_none(tmp_path: Path) -> None:
    """Not those of the command that loads it."""
    parsed = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--size', type=int{more})\nsize = parser.parse_args().size\n"
    given, path = sys.argv, script(tmp_path, parsed.format(more=", default=3") + GOOD.format(more=", name=str(size)"))
    assert load_job(path).name == "3" and sys.argv is given
    with pytest.raises(JobError, match=r"ended the process \(exit code 2\); it runs without command-line arguments"):
        load_job(script(tmp_path, parsed.format(more=", required=True") + GOOD.format(more="")))


# -- what else says what to train


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences and their classes; `masked`: anew each time, as a collator for masked language models does."""

    def __init__(self, count: int = 10, *, masked: bool = False) -> None:
        self.count, self.masked = count, masked

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 60, (12,), generator=torch.Generator().manual_seed(index))
        if self.masked:
            ids[torch.rand(12) < 0.5] = 4
        return {"input_ids": ids, "labels": ids.clone()}


def test_model_loss_optimizer_and_batches() -> None:
    model = nn.Linear(3, 1)
    batches = [{"x": torch.full((4, 3), float(i)), "scale": 2.0} for i in range(3)]
    job = as_job(
        (model, lambda m, batch: m(batch["x"]).sum() * batch["scale"], torch.optim.SGD(model.parameters()), batches)
    )
    assert job is not None and job.batch_size == 4 and [c.shape for c in job.data] == [(12, 3)]
    assert torch.equal(job.loss_fn(model, job.data[0][4:8]), model(batches[1]["x"]).sum() * 2.0)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        functional.mse_loss,
        lambda model, x, y: functional.mse_loss(model(x), y),
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        lambda model, batch, scale=1.0: functional.mse_loss(model(batch[0]), batch[1]) * scale,
    ],
)
def test_the_loss_takes_a_batch_or_its_parts_or_output_and_target(loss: Any) -> None:
    model, batch = nn.Linear(3, 1), (torch.randn(4, 3), torch.randn(4, 1))
    job = as_job((model, loss, torch.optim.SGD(model.parameters()), [batch]))
    assert job is not None
    assert torch.equal(
        job.loss_fn(model, *(column[:] for column in job.data)), functional.mse_loss(model(batch[0]), batch[1])
    )


def test_a_loss_of_output_and_target_wants_batches_of_inputs_and_a_target() -> None:
    model = nn.Linear(3, 1)
    job = as_job((model, nn.MSELoss(), torch.optim.SGD(model.parameters()), [{"x": torch.randn(4, 3)}]))
    assert job is not None
    with pytest.raises(JobError, match=r"MSELoss as the loss .* inputs and a target, not one dict"):
        job.loss_fn(model, *job.data)


@pytest.mark.parametrize("masked", [False, True])
def test_data_that_is_drawn_anew_each_time(masked: bool) -> None:
    model = nn.Linear(3, 1)
    loader = torch.utils.data.DataLoader(Rows(masked=masked), 4, shuffle=True)
    parts = (model, lambda m, batch: m(batch), torch.optim.SGD(model.parameters()), loader)
    if not masked:
        assert as_job(parts) is not None
        return
    with pytest.raises(JobError, match=r"test_job_sources\.py:\d+: the data changes each time it is read"):
        as_job(parts)


def test_data_that_is_seldom_another_is_drawn_anew_too() -> None:
    class Seldom(Rows):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = super().__getitem__(index)
            return {name: value + 1 for name, value in row.items()} if random.random() > 1.0 else row

    model, state = nn.Linear(3, 1), random.getstate()
    loader = torch.utils.data.DataLoader(Seldom(), 4)
    with pytest.raises(JobError, match=r"test_job_sources\.py:\d+: the data changes each time it is read"):
        as_job((model, lambda m, batch: m(batch), torch.optim.SGD(model.parameters()), loader))
    random.setstate(state)


def trainer(folder: Path, *, masked: bool = False, callbacks: Sequence[str] = (), **arguments: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    methods = dict.fromkeys(callbacks, lambda *_, **__: None)
    watching = [type("_Watching", (transformers.TrainerCallback,), methods)()]
    config = transformers.GPT2Config(
        vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    settings = {
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "warmup_steps": 2,
    }
    told = transformers.TrainingArguments(str(folder), **{**settings, **arguments})
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, told, train_dataset=Rows(masked=masked), callbacks=watching)


def test_a_trainer_makes_whole_updates_of_the_batches_that_it_does_not_leave_out(tmp_path: Path) -> None:
    """A Trainer with ten samples, whose loss is not divided by a count of labels."""
    source = trainer(tmp_path, dataloader_drop_last=True, num_train_epochs=3, callbacks=["on_log", "on_train_end"])
    job = as_job(source)
    assert job is not None and job.epochs == 3
    assert source.lr_scheduler.lr_lambdas[0].keywords["num_training_steps"] == 6
    source = trainer(tmp_path, gradient_accumulation_steps=2)
    source.model_accepts_loss_kwargs = False
    with pytest.raises(JobError, match="ends each epoch of 3 batches with an update of 1 instead of 2"):
        as_job(source)


def test_a_trainers_own_step_is_not_left_out(tmp_path: Path) -> None:
    source = trainer(tmp_path)
    kind = type(source)
    source.__class__ = type("Adversarial", (kind,), {"training_step": lambda *_: torch.zeros(())})
    with pytest.raises(JobError, match=r"Adversarial\.training_step runs in each step"):
        as_job(source)


@pytest.mark.slow
def test_a_trainers_default_optimizer_is_fused_and_recorded(tmp_path: Path) -> None:
    job = as_job(trainer(tmp_path))
    assert job is not None and job.optimizer.param_groups[0]["fused"]
    graph = prepare(job, updates=4).graphs["step"]
    assert any(op.name == "aten::_fused_adamw_" for op in graph.ops)


def test_a_trainers_own_loss_schedule_and_clipping(tmp_path: Path) -> None:
    source = trainer(tmp_path, max_grad_norm=0.5, learning_rate=1e-2, seed=7, num_train_epochs=2)
    job = as_job(source)
    assert job is not None
    assert (job.batch_size, job.clip_grad_norm, job.seed, job.accumulate, job.epochs) == (4, 0.5, 7, 1, 2)
    assert job.scheduler is source.lr_scheduler and isinstance(job.optimizer, torch.optim.AdamW)
    batch = {key: column[:4] for key, column in zip(("input_ids", "labels"), job.data, strict=True)}
    torch.manual_seed(1)
    ours = job.loss_fn(job.model, *(column[:4] for column in job.data))
    (inputs,), items = source.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    torch.manual_seed(1)
    assert torch.equal(ours.detach(), source.training_step(job.model, inputs, items))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": True}, "bf16=True changes its step"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"callbacks": ["on_step_end"]}, r"_Watching\.on_step_end runs in each step"),
        ({"masked": True}, "changes each time"),
    ],
)
def test_a_trainer_whose_step_a_bundle_does_not_have(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        as_job(trainer(tmp_path, **settings))


LIGHTNING = """
import lightning, torch
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def training_step(self, batch, index):
        x, y = batch
        return {{"loss": torch.nn.functional.cross_entropy(self.net(x), y)}}
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "{interval}"}}}}
class Data(lightning.LightningDataModule):
    def setup(self, stage):
        self.rows = torch.utils.data.TensorDataset(torch.ones(9, 3), torch.zeros(9, dtype=torch.long))
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.rows, 4, shuffle=True)
def port_job():
    return Module(), Data()
"""


@pytest.mark.slow
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_lightning_module_with_its_data(tmp_path: Path, interval: str) -> None:
    pytest.importorskip("lightning")
    path = script(tmp_path, LIGHTNING.format(interval=interval))
    if interval == "epoch":
        with pytest.raises(JobError, match="stepped once per epoch"):
            load_job(path)
        return
    job = load_job(path)
    assert job.batch_size == 4 and [len(c) for c in job.data] == [9, 9]
    assert isinstance(job.scheduler, torch.optim.lr_scheduler.LinearLR)
    assert job.loss_fn(job.model, *(c[:2] for c in job.data)).shape == ()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def on_train_batch_end(self, *_): pass", r"Module\.on_train_batch_end runs between the training steps"),
        ("def optimizer_step(self, *_, **__): pass", r"Module\.optimizer_step runs between the training steps"),
        ("def weight(self, index): return 1 / (1 + index)", "asks for the number of the batch"),
        ("def weight(self, index): return 2.0 if index == 0 else 1.0", "asks for the number of the batch"),
        ("def weight(self, index): return min(1.0, self.global_step / 9)", "asks for global_step"),
        ("def weight(self, index): return 0.5 ** self.current_epoch", "asks for current_epoch"),
        ("def on_validation_epoch_end(self): pass", ""),
        ("def setup(self, stage): self.weight = lambda index: 1.0 if stage == 'fit' else None", ""),
    ],
)
def test_what_lightning_would_do_in_its_loop_is_not_left_out(tmp_path: Path, more: str, message: str) -> None:
    pytest.importorskip("lightning")
    text = LIGHTNING.format(interval="step").replace(
        "cross_entropy(self.net(x), y)", "cross_entropy(self.net(x), y) * self.weight(index)"
    )
    text = text.replace(
        "    def training_step", f"    def weight(self, index): return 1.0\n    {more}\n    def training_step"
    )
    path = script(tmp_path, text)

    def step() -> torch.Tensor:
        job = load_job(path)
        loss: torch.Tensor = job.loss_fn(job.model, *(c[:2] for c in job.data))
        return loss

    if message:
        with pytest.raises(JobError, match=message):
            step()
    else:
        assert step().isfinite() and load_job(path).model.global_step == 0


def test_columns_of_a_data_set_are_kept_in_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]}).with_format("torch")
    model = torch.nn.Linear(2, 2)
    given = TrainingJob(model, None, torch.optim.SGD(model.parameters()), [rows["x"], rows["y"]], 1)  # type: ignore[arg-type]
    job = as_job(given, tmp_path)
    assert job is given and all(isinstance(column, ColumnFile) for column in job.data)
    assert torch.equal(job.data[0][:], torch.tensor([[1.0, 2.0], [3.0, 4.0]])) and job.data[1][:].tolist() == [0, 1]


def parts_of(**loader: Any) -> TrainingJob | None:
    model = nn.Linear(3, 2)
    rows = torch.utils.data.TensorDataset(torch.arange(30.0).view(10, 3), torch.zeros(10, dtype=torch.int64))
    batches = torch.utils.data.DataLoader(rows, **loader)
    return as_job((model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), batches))


def test_what_a_loader_leaves_out_of_an_epoch_trains_in_another() -> None:
    for shuffle in (False, True):
        job = parts_of(batch_size=4, shuffle=shuffle, drop_last=True)
        assert (
            job is not None and job.drop_last and sorted(job.data[0][:][:, 0].tolist()) == [3.0 * i for i in range(10)]
        )
        kept = parts_of(batch_size=4, shuffle=shuffle)
        assert kept is not None and not kept.drop_last


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.WeightedRandomSampler([1.0] * 10, 10),
        torch.utils.data.RandomSampler(range(10), replacement=True),
        torch.utils.data.RandomSampler(range(10), num_samples=6),
    ],
)
def test_samples_that_are_drawn_anew_for_each_epoch_are_refused(sampler: Any) -> None:
    torch.manual_seed(0)
    with pytest.raises(
        JobError, match=f"{type(sampler).__name__} selects different samples in each epoch or repeats some"
    ):
        parts_of(batch_size=2, sampler=sampler)


def test_a_part_of_the_samples_is_an_epoch() -> None:
    job = parts_of(batch_size=2, sampler=torch.utils.data.SubsetRandomSampler(range(4)))
    assert job is not None and len(job.data[0]) == 4
