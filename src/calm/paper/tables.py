"""An experiment's table: our numbers with their 95% intervals, the paper's own beside them, and what they answer."""

from typing import Any

from calm.paper.values import Table, Value

LARGE = 1e7
PAPER = "paper: "
INTERVALS = "Scores in percent, with 95% intervals over documents."


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Head and rows; a column of the paper's follows each of ours that it prints."""
    shown = [name for name in table.experiment.columns if any(name in line.values for line in table.lines.values())]
    printed = {name for line in table.lines.values() for name in line.row.paper}
    head = [""]
    for name in shown:
        title = table.experiment.columns[name]
        head += [title, PAPER + title] if name in printed else [title]
    rows = []
    for label, line in table.lines.items():
        row = [label + (f" ({len(line.briers)} seeds)" if len(line.briers) > 1 else "")]
        for name in shown:
            row.append("fails" if line.failed else _shown(line.values.get(name)))
            if name in printed:
                row.append(_number(line.row.paper.get(name)))
        rows.append(row)
    return head, rows


def about_intervals(table: Table) -> str:
    """What the intervals hold, and what chance in training adds to them."""
    if len(table.repeats) < 2:
        return f"{INTERVALS} How much a training's seed matters is not in them."
    spread = {title: table.chance(name) for name, title in (("brier_lm", "BrierLM"), ("brier_1", "Brier-1"))}
    known = " and ".join(f"{value:.2g} in {title}" for title, value in spread.items() if value is not None)
    return (
        f"{INTERVALS} The answers also allow for chance in training: by {len(table.repeats)} seeds of the base model, "
        f"95 of 100 trainings differ from the mean by at most {known}."
    )


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def document(table: Table, verdicts: list[dict[str, Any]], command: str, about: str) -> str:
    """The Markdown file of an experiment."""
    experiment = table.experiment
    note = f"\n{experiment.note}\n" if experiment.note else ""
    answers = [[v["claim"], v["answer"], v["numbers"]] for v in verdicts]
    return f"""# {experiment.title}

`{command}` ({about}). The paper, {experiment.place}: {experiment.finding}

{markdown(*cells(table))}

{about_intervals(table)}
{note}
{markdown(["does it hold here?", "answer", "numbers"], answers)}

![{experiment.title}]({experiment.name}.png)
"""


def _shown(value: Value | None) -> str:
    if value is None:
        return ""
    if value.value is None:
        return "none"
    if value.low is None or value.high is None:
        return _number(value.value) + (" (lower end below 0)" if value.high is not None else "")
    return f"{_number(value.value)} ({_number(value.low)} to {_number(value.high)})"


def _number(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or value == int(value):
        return f"{value:.3g}" if abs(value) >= LARGE else f"{int(value):,}"
    return f"{value:.2f}" if 1 <= abs(value) < LARGE else f"{value:.3g}"
