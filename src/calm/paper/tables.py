"""Tables of an experiment: measured values with 95% intervals next to the paper's, and verdicts on its claims."""

from typing import Any

from calm.paper.experiment import Table, Value

LARGE = 1e7
PAPER = "paper: "
INTERVALS = "Scores are in percent, with 95% bootstrap intervals over documents."


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Columns that the paper also reports are followed by the paper's values."""
    columns = [name for name in table.experiment.columns if any(name in line.values for line in table.lines.values())]
    in_paper = {name for line in table.lines.values() for name in line.row.paper}
    header = [""]
    for name in columns:
        title = table.experiment.columns[name]
        header += [title, PAPER + title] if name in in_paper else [title]
    rows = []
    for label, line in table.lines.items():
        row = [label + (f" ({len(line.briers)} seeds)" if len(line.briers) > 1 else "")]
        for name in columns:
            row.append("failed" if line.failed else _formatted(line.values.get(name)))
            if name in in_paper:
                row.append(_number(line.row.paper.get(name)))
        rows.append(row)
    return header, rows


def about_intervals(table: Table) -> str:
    """What the intervals cover, and how much scores vary across training seeds."""
    if len(table.repeats) < 2:
        return f"{INTERVALS} Variance across training seeds is not included."
    spread = {title: table.seed_margin(name) for name, title in (("brier_lm", "BrierLM"), ("brier_1", "Brier-1"))}
    margins = " and ".join(f"±{value:.2g} for {title}" for title, value in spread.items() if value is not None)
    return (
        f"{INTERVALS} Verdicts also account for variance across training seeds, estimated from {len(table.repeats)} "
        f"seeds of the base model (95%: {margins})."
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def document(table: Table, verdicts: list[dict[str, Any]], command: str, about: str) -> str:
    """Contents of the Markdown file of an experiment."""
    experiment = table.experiment
    note = f"\n{experiment.note}\n" if experiment.note else ""
    verdict_rows = [[v["claim"], v["answer"], v["numbers"]] for v in verdicts]
    return f"""# {experiment.title}

`{command}` ({about}). Paper, {experiment.source}: {experiment.finding}

{markdown(*cells(table))}

{about_intervals(table)}
{note}
{markdown(["claim", "reproduced?", "evidence"], verdict_rows)}

![{experiment.title}]({experiment.name}.png)
"""


def _formatted(value: Value | None) -> str:
    if value is None:
        return ""
    if value.value is None:
        return "undefined"
    if value.low is None or value.high is None:
        return _number(value.value) + (" (lower bound undefined)" if value.high is not None else "")
    return f"{_number(value.value)} ({_number(value.low)} to {_number(value.high)})"


def _number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or value == int(value):
        return f"{value:.3g}" if abs(value) >= LARGE else f"{int(value):,}"
    return f"{value:.2f}" if 1 <= abs(value) < LARGE else f"{value:.3g}"
