"""What a person sees: progress bars and tables on stderr, answers on stdout."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from calm.data.prepare import Report
    from calm.data.tokenizer import Tokenizer
    from calm.paper.cost import Cost
    from calm.sampling.text import Piece
    from calm.train.loop import Report as StepReport

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)
CHUNK_COLOURS = (
    "black on bright_cyan",
    "black on bright_yellow",
    "black on bright_green",
    "black on bright_magenta",
)


def print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


def warn(message: str) -> None:
    stderr.print(f"[yellow]warning:[/] {escape(message)}", soft_wrap=True)


@contextmanager
def preparation_progress() -> Iterator[Callable[["Report"], None]]:
    """A bar with documents, tokens a second and the time left."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("reading", total=None, done="")
        stage, began, before = "", 0.0, 0

        def show(report: "Report") -> None:
            nonlocal stage, began, before
            counts, now = report.counts, progress.get_time()
            if report.stage != stage:
                stage, began, before = report.stage, now, counts.tokens
                progress.reset(task, total=report.bytes_total)
            done = f"{report.bytes_read / 1e6:,.0f} MB"
            if counts.tokens:
                speed = (counts.tokens - before) / max(now - began, 1e-3)
                done = f"{counts.documents:,} documents · {counts.tokens:,} tokens · {speed:,.0f} tokens/s"
            progress.update(task, description=stage, completed=report.bytes_read, done=done)

        yield show


@contextmanager
def training_progress(steps: int, enabled: bool = True) -> Iterator[Callable[["StepReport"], None]]:
    """One live line: step, loss, tokens a second, share of the machine's peak, time left. Plain lines into a file."""
    columns = (
        TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
        BarColumn(),
        TextColumn("{task.fields[done]}"),
    )
    live = stderr.is_terminal
    if not enabled:
        yield lambda _: None
        return
    with Progress(*columns, TimeRemainingColumn(compact=True), console=stderr, disable=not live) as progress:
        task = progress.add_task("training", total=steps, done="starting")

        def show(report: "StepReport") -> None:
            metrics = report.metrics
            parts = [f"loss {metrics['loss']:.4f}"]
            if "tokens_per_second" in metrics:
                parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
            if "share_of_peak" in metrics:
                parts.append(f"{metrics['share_of_peak']:.0%} of peak")
            if "score" in metrics:
                parts.append(f"score {metrics['score']:.5f}")
            if "brier_1" in metrics:
                parts.append(f"Brier-1 {metrics['brier_1']:.2f}")
            progress.update(task, completed=report.step, done=" · ".join(parts))
            if not live and (report.step % max(1, report.steps // 20) == 0 or report.step == report.steps):
                stderr.print(f"step {report.step:,}/{report.steps:,} · {' · '.join(parts)}", soft_wrap=True)

        yield show


def values_table(title: str, values: dict[str, Any]) -> Table:
    """Names and numbers, one a row."""
    table = Table(title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in values.items():
        if not isinstance(value, list | dict) and value is not None:
            shown = (
                f"{value:,}" if isinstance(value, int) else f"{value:.5f}" if isinstance(value, float) else str(value)
            )
            table.add_row(name.replace("_", " "), shown)
    return table


@contextmanager
def evaluation_progress(enabled: bool = True) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for every model: tokens scored, and the time left where the number of all is known."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    shown = enabled and stderr.is_terminal
    with Progress(*columns, TimeRemainingColumn(compact=True), console=stderr, disable=not shown) as progress:
        tasks: dict[str, Any] = {}

        def show(name: str, tokens: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=tokens)

        yield show


def scores_tables(answer: dict[str, Any]) -> Iterator[Table]:
    """BrierLM and its parts, a column a model; then the differences with their paired intervals."""
    briers = ("BrierLM", "Brier-1", "Brier-2", "Brier-3", "Brier-4")
    rows = {
        "BrierLM": "brier_lm",
        **{f"Brier-{n}": f"brier_{n}" for n in range(1, 5)},
        "accuracy": "accuracy",
        **{f"accuracy-{n}": f"accuracy_{n}" for n in range(1, 5)},
        "collision": "collision",
        **{f"collision-{n}": f"collision_{n}" for n in range(1, 5)},
        "nats a token": "cross_entropy",
        "perplexity": "perplexity",
        "bits a byte": "bits_per_byte",
        "nats a token, at most": "cross_entropy_bound",
        "perplexity, at most": "perplexity_bound",
        "bits a byte, at most": "bits_per_byte_bound",
        "positions": "positions",
        "documents": "documents",
    }
    table = Table(
        title=", ".join(filter(None, (answer["data"], answer["split"]))),
        caption=f"percent ± standard error, a higher Brier is better; {answer['positions']}; {answer['samples']} "
        f"samples; at most {answer['context']} tokens before"
        + (f"; likelihoods bounded with {answer['latents']} latents" if answer["latents"] else ""),
    )
    table.add_column("")
    for name in answer["models"]:
        table.add_column(name, justify="right")
    for title, key in rows.items():
        if any(measures.get(key) is not None for measures in answer["models"].values()):
            values = (_shown(measures, key) for measures in answer["models"].values())
            table.add_row(title, *values, end_section=title.endswith(("-4", "byte", "bits a byte, at most")))
    yield table
    if answer["differences"]:
        differences = Table("", "", "difference", "95% interval of pairs", title="Differences")
        for name, scores in answer["differences"].items():
            for number, title in enumerate(briers):
                pair, last = name if number == 0 else "", number == len(briers) - 1
                differences.add_row(pair, title, *_difference(scores[rows[title]]), end_section=last)
        yield differences


def _difference(score: dict[str, Any]) -> tuple[str, str]:
    if score["value"] is None:
        return "no meaning", ""
    digits = _digits(score)
    low, high = (f"{score[end]:+.{digits}f}" if score[end] is not None else "?" for end in ("low", "high"))
    return f"{score['value']:+.{digits}f}", f"{low} … {high}" if score["standard_error"] is not None else ""


def _shown(measures: dict[str, Any], key: str) -> str:
    value = measures.get(key)
    if not isinstance(value, dict):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
    if value["value"] is None:  # a BrierLM with a factor that is not above 0
        first = next(n for n in range(1, 5) if measures[f"brier_{n}"]["value"] <= 0)
        return f"below 0\n(Brier-{first}: {_shown(measures, f'brier_{first}')})"
    digits = _digits(value)
    error = f" ± {value['standard_error']:.{digits}f}" if value["standard_error"] is not None else ""
    doubt = "\n(may be below 0)" if error and value["low"] is None else ""  # of too many samples that were drawn again
    return f"{value['value']:.{digits}f}{error}{doubt}"


def _digits(score: dict[str, Any]) -> int:
    """Decimals that show two figures of the error: two to five."""
    error = score["standard_error"]
    return min(max(1 - math.floor(math.log10(error)), 2), 5) if error else 2


def cost_tables(costs: list["Cost"], printed: dict[str, tuple[float, float, float]]) -> Iterator[Table]:
    """What recipes cost, beside the numbers of the paper's Table 1, and each recipe's parts."""
    table = Table(title="Cost")
    table.add_column("recipe", no_wrap=True)
    columns = ("parameters", "with autoencoder", "training FLOPs", "inference FLOPs/token", "at N candidates", "memory")
    for column in columns:
        table.add_column(column, justify="right")
    for cost in costs:
        parameters, training, inference = printed.get(cost.name, (None, None, None))
        more = cost.inference_flops_per_token_with_candidates
        table.add_row(
            cost.name,
            f"{cost.parameters / 1e6:,.1f}M{_beside(cost.parameters, parameters)}",
            f"{cost.parameters_with_autoencoder / 1e6:,.1f}M",
            f"{cost.train_flops:.3g}{_beside(cost.train_flops, training)}",
            f"{cost.inference_flops_per_token:.3g}{_beside(cost.inference_flops_per_token, inference)}",
            f"{more:.3g} (N={cost.candidates})" if more else "-",
            f"{cost.peak_memory / 1e9:,.1f} GB",
        )
    if any(cost.name in printed for cost in costs):
        table.caption = "in brackets: the difference from what the paper prints"
    yield table
    for cost in costs:
        parts = Table(title=f"{cost.name}, vocabulary {cost.vocabulary:,}")
        for column in ("part", "parameters", "training FLOPs/token", "inference FLOPs/token"):
            parts.add_column(column, justify="left" if column == "part" else "right")
        for name, part in cost.parts.items():
            flops = part.train_flops_per_token, part.inference_flops_per_token
            parts.add_row(name, f"{part.parameters:,}", *(f"{f:.3g}" for f in flops))
        yield parts


def _beside(value: float, printed: float | None) -> str:
    return "" if printed is None else f" ({value / printed - 1:+.1%})"


def preparation_summary(manifest: dict[str, Any]) -> Table:
    table = Table(title=f"{manifest['vocab_size']:,} tokens in the vocabulary, stored as {manifest['dtype']}")
    for column in ("split", "documents", "tokens", "bytes a token", "shards"):
        table.add_column(column, justify="left" if column == "split" else "right")
    for name, split in manifest["splits"].items():
        ratio = f"{split['bytes'] / split['tokens']:.2f}" if split["tokens"] else "-"
        counts = f"{split['documents']:,}", f"{split['tokens']:,}", ratio, str(len(split["shards"]))
        table.add_row(name, *counts)
    return table


def coloured_chunks(tokenizer: "Tokenizer", ids: list[int], chunk_size: int) -> Text:
    """A text with one colour a chunk, a thick line between chunks and a thin one between tokens."""
    text = Text()
    for number, start in enumerate(range(0, len(ids), chunk_size)):
        tokens = [tokenizer.decode([i]).replace("\n", "↵") for i in ids[start : start + chunk_size]]
        text.append("┃" if start else "")
        text.append("│".join(tokens), style=CHUNK_COLOURS[number % len(CHUNK_COLOURS)])
    return text


def show_texts(pieces: Iterable["Piece"], count: int, chunks: bool) -> None:
    """A single text as it comes; several one after the other, when all are there or it was interrupted."""
    if count == 1:
        for number, piece in enumerate(pieces):
            _write(piece, number, chunks)
        print()
        return
    texts: list[list[Piece]] = [[] for _ in range(count)]
    try:
        for piece in pieces:
            texts[piece.number].append(piece)
    finally:
        for number, text in enumerate(texts, start=1):
            stdout.rule(f"{number} of {count}")
            for step, piece in enumerate(text):
                _write(piece, step, chunks)
            print()


def _write(piece: "Piece", number: int, chunks: bool) -> None:
    if chunks:
        stdout.print(_piece(piece, number), end="", soft_wrap=True)
    else:
        stdout.file.write(piece.text)  # as it is: rich would change tabs and control characters
    stdout.file.flush()


def _piece(piece: "Piece", number: int) -> Text:
    text = Text(piece.text.replace("\n", "↵"), style=CHUNK_COLOURS[number % len(CHUNK_COLOURS)])
    if piece.agreement is not None:
        text.append(
            f"{piece.agreement:.{0 if piece.agreement >= 0.1 else 1}%}", style="not bold dim default on default"
        )
    return text if stdout.is_terminal else text.append("┃")


def collected_texts(pieces: Iterable["Piece"], count: int) -> dict[str, Any]:
    texts = [{"text": "", "tokens": 0, "agreement": []} for _ in range(count)]
    for piece in pieces:
        text = texts[piece.number]
        text["text"] += piece.text
        text["tokens"] += len(piece.ids)
        if piece.ids and piece.agreement is not None:
            text["agreement"].append(round(piece.agreement, 4))
    return {"texts": texts}


class StageScreen:
    """What long work shows on stderr: a line a stage, and below it the stage's own bar."""

    preparation = staticmethod(preparation_progress)
    training = staticmethod(training_progress)
    evaluation = staticmethod(evaluation_progress)
    warn = staticmethod(warn)

    def stage(self, number: int, total: int, title: str, note: str) -> None:
        stderr.print(f"[bold]\\[{number}/{total}] {escape(title)}[/] [dim]{escape(note)}[/]", soft_wrap=True)


class SilentScreen:
    """What the other processes show."""

    @contextmanager
    def preparation(self) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    evaluation = preparation

    @contextmanager
    def training(self, steps: int) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    def stage(self, number: int, total: int, title: str, note: str) -> None: ...

    def warn(self, message: str) -> None: ...


def show_samples(samples: list[dict[str, Any]]) -> None:
    """Continuations of the CALM model, one colour a chunk."""
    for sample in samples:
        text = Text(f"T = {sample['temperature']:g}  ", style="dim")
        text.append(sample["prompt"].replace("\n", "↵"), style="not dim bold")
        for number, piece in enumerate(sample["calm"]):
            text.append(piece.replace("\n", "↵"), style=f"not dim {CHUNK_COLOURS[number % len(CHUNK_COLOURS)]}")
            text.append("" if stdout.is_terminal else "┃")
        stdout.print(text, soft_wrap=True)
