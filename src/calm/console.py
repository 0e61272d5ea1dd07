"""Terminal output: progress bars and warnings on stderr, results on stdout. Under torchrun only rank 0 prints."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

if TYPE_CHECKING:
    from calm.data.prepare import Report
    from calm.data.tokenizer import Tokenizer
    from calm.generate.text import TextDelta
    from calm.paper.cost import Cost
    from calm.train.loop import Report as StepReport

IS_MAIN = os.environ.get("RANK", "0") == "0"
stderr = Console(stderr=True, highlight=False, quiet=not IS_MAIN)
stdout = Console(highlight=False, quiet=not IS_MAIN)
STEP_METRICS = {  # in the progress line of training
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "share_of_peak": "{:.0%} of peak",
    "score": "score {:.5f}",
    "brier_1": "Brier-1 {:.2f}",
}
CHUNK_STYLES = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")


def print_json(value: Any) -> None:
    if IS_MAIN:
        print(json.dumps(value, ensure_ascii=False))


def print_results(results: Any, tables: Iterable[Table], as_json: bool) -> None:
    """Print results as JSON, or else as tables."""
    if as_json:
        print_json(results)
    else:
        for table in tables:
            stdout.print(table)


def warn(message: str) -> None:
    stderr.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)


@contextmanager
def preparation_progress() -> Iterator[Callable[["Report"], None]]:
    """Progress bar of `calm prepare`: documents, tokens per second, remaining time."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("reading", total=None, done="")
        stage, start_time, start_tokens = "", 0.0, 0

        def show(report: "Report") -> None:
            nonlocal stage, start_time, start_tokens
            counts, now = report.counts, progress.get_time()
            if report.stage != stage:
                stage, start_time, start_tokens = report.stage, now, counts.tokens
                progress.reset(task, total=report.bytes_total)
            done = f"{report.bytes_read / 1e6:,.0f} MB"
            if counts.tokens:
                speed = (counts.tokens - start_tokens) / max(now - start_time, 1e-3)
                done = f"{counts.documents:,} documents · {counts.tokens:,} tokens · {speed:,.0f} tokens/s"
            progress.update(task, description=stage, completed=report.bytes_read, done=done)

        yield show


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[["StepReport"], None]]:
    """Live line with step, loss, tokens/s, share of peak FLOP/s and remaining time; log lines without a terminal."""
    columns = (
        TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(compact=True),
    )
    live = stderr.is_terminal
    with Progress(*columns, console=stderr, disable=not live) as progress:
        task = progress.add_task("training", total=steps, done="starting")

        def show(report: "StepReport") -> None:
            metrics = report.metrics
            done = " · ".join(text.format(metrics[name]) for name, text in STEP_METRICS.items() if name in metrics)
            done = done or "starting"  # nothing is logged yet
            progress.update(task, completed=report.step, done=done)
            if not live and (report.step % max(1, report.steps // 20) == 0 or report.step == report.steps):
                stderr.print(f"step {report.step:,}/{report.steps:,} · {done}", soft_wrap=True)

        yield show


def values_table(title: str, values: dict[str, Any]) -> Table:
    """Table with one row per name and value. Lists, dicts and None are left out."""
    table = Table(Column(), Column(justify="right"), title=title, show_header=False)
    for name, value in values.items():
        if not isinstance(value, list | dict) and value is not None:
            spec = "," if isinstance(value, int) else ".5f" if isinstance(value, float) else ""
            table.add_row(name.replace("_", " "), format(value, spec))
    return table


def _numbers_table(*columns: str, title: str, caption: str | None = None) -> Table:
    """Empty table whose columns but the first are right-aligned."""
    first, *others = columns
    return Table(first, *(Column(name, justify="right") for name in others), title=title, caption=caption)


@contextmanager
def evaluation_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """One progress bar per model: tokens scored, and the remaining time if the total is known."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} tokens"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def show(name: str, tokens: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=tokens)

        yield show


def scores_tables(results: dict[str, Any]) -> Iterator[Table]:
    """Table of scores with one column per model, then a table of paired differences between models."""
    briers = ("BrierLM", "Brier-1", "Brier-2", "Brier-3", "Brier-4")
    rows = {
        "BrierLM": "brier_lm",
        **{f"Brier-{n}": f"brier_{n}" for n in range(1, 5)},
        "accuracy": "accuracy",
        **{f"accuracy-{n}": f"accuracy_{n}" for n in range(1, 5)},
        "collision": "collision",
        **{f"collision-{n}": f"collision_{n}" for n in range(1, 5)},
        "nats per token": "cross_entropy",
        "perplexity": "perplexity",
        "bits per byte": "bits_per_byte",
        "nats per token (upper bound)": "cross_entropy_bound",
        "perplexity (upper bound)": "perplexity_bound",
        "bits per byte (upper bound)": "bits_per_byte_bound",
        "positions": "positions",
        "documents": "documents",
    }
    table = _numbers_table(
        "",
        *results["models"],
        title=", ".join(filter(None, (results["data"], results["split"]))),
        caption=f"percent ± standard error, higher Brier scores are better; {results['positions']}; "
        f"{results['samples']} samples; context of at most {results['context']} tokens"
        + (f"; upper bounds from {results['latents']} latents" if results["latents"] else ""),
    )
    for title, key in rows.items():
        if any(measures.get(key) is not None for measures in results["models"].values()):
            values = (_cell(measures, key) for measures in results["models"].values())
            table.add_row(title, *values, end_section=title.startswith("bits") or title.endswith("-4"))
    yield table
    if results["differences"]:
        differences = Table("", "", "difference", "95% interval (paired)", title="Differences")
        for name, scores in results["differences"].items():
            for number, title in enumerate(briers):
                pair, last = name if number == 0 else "", number == len(briers) - 1
                differences.add_row(pair, title, *_difference(scores[rows[title]]), end_section=last)
        yield differences


def _difference(score: dict[str, Any]) -> tuple[str, str]:
    if score["value"] is None:
        return "undefined", ""
    digits = _digits(score)
    low, high = (f"{score[end]:+.{digits}f}" if score[end] is not None else "?" for end in ("low", "high"))
    return f"{score['value']:+.{digits}f}", f"{low} … {high}" if score["standard_error"] is not None else ""


def _cell(measures: dict[str, Any], key: str) -> str:
    value = measures.get(key)
    if not isinstance(value, dict):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    if value["value"] is None:  # BrierLM is a geometric mean: undefined if one factor is not above 0
        first = next(n for n in range(1, 5) if measures[f"brier_{n}"]["value"] <= 0)
        return f"below 0\n(Brier-{first}: {_cell(measures, f'brier_{first}')})"
    digits = _digits(value)
    error = f" ± {value['standard_error']:.{digits}f}" if value["standard_error"] is not None else ""
    # no lower bound: the score is undefined in more than 2.5% of the bootstrap samples
    note = "\n(may be below 0)" if error and value["low"] is None else ""
    return f"{value['value']:.{digits}f}{error}{note}"


def _digits(score: dict[str, Any]) -> int:
    """Decimals that show two significant digits of the standard error, from 2 to 5."""
    error = score["standard_error"]
    return min(max(1 - math.floor(math.log10(error)), 2), 5) if error else 2


def cost_tables(costs: list["Cost"], published: dict[str, tuple[float, float, float]]) -> Iterator[Table]:
    """Table of total costs with deviations from Table 1 of the paper, then one table of components per recipe."""
    flops = "training FLOPs", "inference FLOPs/token", "at N candidates"
    columns = ("parameters", "with autoencoder", *flops, "CPU memory", "GPU memory")
    table = _numbers_table("recipe", *columns, title="Cost")
    table.columns[0].no_wrap = True
    for cost in costs:
        parameters, training, inference = published.get(cost.name, (None, None, None))
        with_candidates = cost.inference_flops_per_token_with_candidates
        table.add_row(
            cost.name,
            f"{cost.parameters / 1e6:,.1f}M{_deviation(cost.parameters, parameters)}",
            f"{cost.parameters_with_autoencoder / 1e6:,.1f}M",
            f"{cost.train_flops:.3g}{_deviation(cost.train_flops, training)}",
            f"{cost.inference_flops_per_token:.3g}{_deviation(cost.inference_flops_per_token, inference)}",
            f"{with_candidates:.3g} (N={cost.candidates})" if with_candidates else "-",
            f"{cost.peak_memory / 1e9:,.1f} GB",
            f"{cost.gpu_memory / 1e9:,.1f} GB",
        )
    if any(cost.name in published for cost in costs):
        table.caption = "in parentheses: deviation from the paper"
    yield table
    for cost in costs:
        columns = ("part", "parameters", "training FLOPs/token", "inference FLOPs/token")
        parts = _numbers_table(*columns, title=f"{cost.name}, vocabulary {cost.vocabulary:,}")
        for name, part in cost.parts.items():
            flops = part.train_flops_per_token, part.inference_flops_per_token
            parts.add_row(name, f"{part.parameters:,}", *(f"{f:.3g}" for f in flops))
        yield parts


def _deviation(value: float, published: float | None) -> str:
    return "" if published is None else f" ({value / published - 1:+.1%})"


def show_prepared(output: Path, manifest: dict[str, Any]) -> None:
    """Print a table of prepared data with one row per split, and the first chunks in color."""
    from calm.data.shards import PreparedData

    if skipped := manifest["skipped_documents"]:
        warn(f"skipped {skipped:,} documents that could not be decoded")
    part = manifest.get("part")
    columns = ("split", "documents", "tokens", "bytes per token", "shards")
    title = f"Vocabulary of {manifest['vocab_size']:,} tokens, stored as {manifest['dtype']}"
    table = _numbers_table(*columns, title=title)
    for name, split in manifest["splits"].items():
        if not part and not split["documents"] and manifest["options"].get(f"{name}_share", 1):
            warn(f"no document fell into the {name} split; increase its share")
        ratio = f"{split['bytes'] / split['tokens']:.2f}" if split["tokens"] else "-"
        table.add_row(name, f"{split['documents']:,}", f"{split['tokens']:,}", ratio, str(len(split["shards"])))
    stdout.print(table)
    if part:
        where = f"Part {part['number']} of {part['of']} is in {output}"
        stdout.print(f"{where}. Combine all parts with calm merge.", soft_wrap=True)
        return
    data = PreparedData(output, verify=False)
    if len(stream := data.split("train")):
        stdout.print("First chunks (K = 4 tokens), one color per chunk:")
        stdout.print(colored_chunks(data.tokenizer, stream[:80].tolist(), 4))
    stdout.print(f"Ready in {output}", soft_wrap=True)


def colored_chunks(tokenizer: "Tokenizer", ids: list[int], chunk_size: int) -> Text:
    """Decoded text with one color per chunk, "┃" between chunks and "│" between tokens."""
    text = Text()
    for number, start in enumerate(range(0, len(ids), chunk_size)):
        tokens = [tokenizer.decode([i]).replace("\n", "↵") for i in ids[start : start + chunk_size]]
        text.append("┃" if start else "")
        text.append("│".join(tokens), style=CHUNK_STYLES[number % len(CHUNK_STYLES)])
    return text


def show_texts(deltas: Iterable["TextDelta"], count: int, chunks: bool) -> None:
    """Stream a single text; print several texts one after another once all are complete or on an interrupt."""
    if count == 1:
        for number, delta in enumerate(deltas):
            _print_delta(delta, number, chunks)
        print()
        return
    texts: list[list[TextDelta]] = [[] for _ in range(count)]
    try:
        for delta in deltas:
            texts[delta.index].append(delta)
    finally:
        for number, text in enumerate(texts, start=1):
            stdout.rule(f"{number} of {count}")
            for step, delta in enumerate(text):
                _print_delta(delta, step, chunks)
            print()


def _print_delta(delta: "TextDelta", number: int, chunks: bool) -> None:
    if chunks:
        stdout.print(_colored_delta(delta, number), end="", soft_wrap=True)
    else:
        stdout.file.write(delta.text)  # not by rich, which changes tabs and control characters
    stdout.file.flush()


def _colored_delta(delta: "TextDelta", number: int) -> Text:
    text = Text(delta.text.replace("\n", "↵"), style=CHUNK_STYLES[number % len(CHUNK_STYLES)])
    if delta.agreement is not None:
        text.append(
            f"{delta.agreement:.{0 if delta.agreement >= 0.1 else 1}%}", style="not bold dim default on default"
        )
    return text if stdout.is_terminal else text.append("┃")


def collected_texts(deltas: Iterable["TextDelta"], count: int) -> list[dict[str, Any]]:
    """Generate all texts and return them with their token counts and agreements, for JSON output."""
    texts: list[dict[str, Any]] = [{"text": "", "tokens": 0, "agreement": []} for _ in range(count)]
    for delta in deltas:
        text = texts[delta.index]
        text["text"] += delta.text
        text["tokens"] += len(delta.token_ids)
        if delta.token_ids and delta.agreement is not None:
            text["agreement"].append(round(delta.agreement, 4))
    return texts


class StageScreen:
    """Progress of multi-stage commands on stderr: one line per stage, followed by its progress bar."""

    preparation = staticmethod(preparation_progress)
    training = staticmethod(training_progress)
    evaluation = staticmethod(evaluation_progress)
    warn = staticmethod(warn)

    def stage(self, number: int, total: int, title: str, note: str) -> None:
        stderr.print(f"[bold]\\[{number}/{total}] {escape(title)}[/] [dim]{escape(note)}[/]", soft_wrap=True)


def show_samples(samples: list[dict[str, Any]]) -> None:
    """Print continuations by the CALM model with one color per chunk."""
    for sample in samples:
        text = Text(f"T = {sample['temperature']:g}  ", style="dim")
        text.append(sample["prompt"].replace("\n", "↵"), style="not dim bold")
        for number, delta in enumerate(sample["calm"]):
            text.append(delta.replace("\n", "↵"), style=f"not dim {CHUNK_STYLES[number % len(CHUNK_STYLES)]}")
            text.append("" if stdout.is_terminal else "┃")
        stdout.print(text, soft_wrap=True)
