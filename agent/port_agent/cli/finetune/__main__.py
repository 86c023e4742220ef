"""The process that fine-tunes: `python -m port_agent.cli.finetune OPTIONS [--explain BYTES | --show-data]`, options as
JSON.

`port-agent finetune` starts it. With `--explain` it only describes what it would do; with `--show-data`, it only
shows what it would learn.
"""

import dataclasses
import sys
from typing import TYPE_CHECKING

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from port_agent.cli.finetune.data_examples import example_texts, short_example
from port_agent.cli.terminal import terminal
from port_agent.finetuning.curve import CURVE, bars
from port_agent.finetuning.evaluation import perplexity
from port_agent.finetuning.inputs.options import FinetuneOptions
from port_agent.finetuning.text.tokenizing import TokenizerProcess
from port_planner.base.errors import PortError

if TYPE_CHECKING:
    from rich.console import Console

    from port_agent.finetuning.explain import Explanation
    from port_agent.finetuning.text.examples import Example
    from port_agent.finetuning.text.tokenizing import TokenizedData
    from port_agent.finetuning.training import FinetuneOutcome, Update


def main() -> int:
    """Fine-tune by the options of the command line; return the exit code."""
    options = msgspec.json.decode(sys.argv[1], type=FinetuneOptions)
    console = terminal(stderr=True)
    try:
        tokenizer = TokenizerProcess(options)
        with console.status(f"reading {', '.join(options.data)}"):  # takes minutes for 100 MB
            data = tokenizer.tokenized()  # before torch is loaded, so that the memory used for reading is released
        if sys.argv[2:3] == ["--show-data"]:
            return _show_data(options, data, console)
        if sys.argv[2:3] == ["--explain"]:
            return _explain(options, int(sys.argv[3]), tokenizer)
        from port_agent.finetuning.training import exit_code, finetune

        bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=console,
            disable=options.json,
        )
        task = bar.add_task("training", total=None, pace="")

        def report(update: "Update") -> None:
            if options.json:
                _emit("update", update)
            pace = f"loss {update.loss:.3f}, {update.tokens / update.seconds:,.0f} tokens/s"
            bar.update(task, completed=update.done, total=update.of, pace=pace)

        if data.examples and not options.json:
            console.print(
                Text("port-agent: learned text is in colour: ").append_text(short_example(data.examples[0])),
                soft_wrap=True,
            )
        with bar:
            outcome = finetune(
                options, report, lambda text: console.print(f"port-agent: {text}", soft_wrap=True), tokenizer=tokenizer
            )
    except PortError as error:
        console.print(f"port-agent: {error}", soft_wrap=True)
        return error.exit_code
    if options.json:
        _emit("stopped" if outcome.left else "finished", outcome)
    else:
        terminal().print(_table(outcome))
    return exit_code(outcome)


def _show_data(options: FinetuneOptions, data: "TokenizedData", console: "Console") -> int:
    """Print which parts of the data are learned, and which are not."""
    for note in data.notes:
        console.print(f"port-agent: {note}", soft_wrap=True, markup=False, highlight=False)
    if options.json:
        for example in data.examples:
            _emit("example", example)
        return 0
    for text in example_texts(data.examples):
        terminal().print(text, soft_wrap=True)
    return 0


def _explain(options: FinetuneOptions, ram_bytes: int, tokenizer: TokenizerProcess) -> int:
    """Print what a fine-tuning would do. Raises FinetuneError."""
    from port_agent.cli.finetune.explanation import explanation_table
    from port_agent.finetuning.explain import explain

    found = explain(options, ram_bytes, tokenizer)
    if options.json:
        _emit("explained", found)
    else:
        terminal().print(explanation_table(found, options))
    return 0


def _emit(event: str, facts: "Update | FinetuneOutcome | Explanation | Example") -> None:
    """Print a line of JSON."""
    sys.stdout.write(msgspec.json.encode({"event": event, **dataclasses.asdict(facts)}).decode() + "\n")
    sys.stdout.flush()


def _table(outcome: "FinetuneOutcome") -> Table:
    """Return the outcome as a table for people."""
    table = Table(show_header=False)
    if outcome.left:
        table.add_row("stopped after", f"{outcome.updates} updates; the same command continues from there")
        return table
    table.add_row("updates", str(outcome.updates))
    if outcome.loss_before is not None and outcome.loss_after is not None:
        if not outcome.is_of_tokens:
            fell = f"{outcome.loss_before:.3f} before, {outcome.loss_after:.3f} after"
            table.add_row("loss of held-out texts" if outcome.labels else "loss of held-out pairs", fell)
        else:
            fell = f"{perplexity(outcome.loss_before):.1f} before, {perplexity(outcome.loss_after):.1f} after"
            table.add_row("perplexity of held-out text", fell)
    if outcome.evaluations:
        table.add_row("held-out loss", _course(outcome))
    if outcome.sample_after is not None:
        table.add_row("sample before", outcome.sample_before or "(in an earlier run)")
        table.add_row("sample after", outcome.sample_after)
    table.add_row("written", outcome.out)
    return table


def _course(outcome: "FinetuneOutcome") -> str:
    losses = [one.loss for one in outcome.evaluations]
    best = "" if outcome.best_updates is None else f"; the result is from update {outcome.best_updates}, the best one"
    return f"{losses[0]:.3f} {bars(losses)} {losses[-1]:.3f}{best}; all values are in {CURVE}"


if __name__ == "__main__":
    sys.exit(main())
