"""Output files of a reproduction: a Markdown table and a figure per experiment, and one HTML report.

Tables show measured values with 95% intervals next to the paper's, and verdicts on its claims.
"""

from html import escape
from typing import Any

from calm import pages
from calm.config import to_yaml
from calm.files import write_atomic
from calm.paper.experiment import Experiment, Table, Value
from calm.paper.experiments import EXPERIMENTS
from calm.paper.figures import draw
from calm.paper.reproduce import Reproduction

REPORT = "report.html"
STYLE = ".yes { color: #2a8c4a; } .no { color: #c0392b; } details { margin: .6rem 0; }"
LARGE = 1e7  # from here on, numbers are printed in scientific notation
INTERVALS = "Scores are in percent, with 95% bootstrap intervals over documents."


def write_experiment(reproduction: Reproduction, experiment: Experiment) -> bool:
    """Write the table and figure of an experiment unless they are up to date. Returns whether files were written."""
    name, scale = experiment.name, reproduction.scale
    figure, digest = reproduction.output / f"{name}.png", reproduction.digest(experiment)
    if figure.exists() and reproduction.results.experiments.get(name, {}).get("digest") == digest:
        return False
    table = reproduction.table(experiment)
    numbers = {"digest": digest, **as_json(table)}
    command = f"calm reproduce {name} --scale {scale.name}"
    if scale.has_custom_chunk_size:
        command += f" --chunk-size {scale.chunk_size}"
    seeds = f"seeds {', '.join(map(str, scale.seeds))}"
    markdown = document(table, numbers["verdicts"], command, f"K = {scale.chunk_size}, {seeds}")
    write_atomic(figure, draw(table))
    write_atomic(reproduction.output / f"{name}.md", markdown.encode())
    reproduction.results.experiments[name] = numbers
    reproduction.results.write()
    return True


def write_report(reproduction: Reproduction) -> None:
    """Write the HTML report of all experiments without pending measures, in the paper's order."""
    stored = reproduction.results.experiments
    done = [name for name, experiment in EXPERIMENTS.items() if name in stored and not reproduction.pending(experiment)]
    environments = {
        f"{measure['hardware']}; " + ", ".join(f"{k} {v}" for k, v in measure["versions"].items())
        for measure in reproduction.results.measures.values()
    }
    body = f"""<h1>Reproduction of the paper</h1>
<p class="note">Scale {escape(reproduction.results.header["scale"])}: {escape(reproduction.scale.about)}</p>
<ul>{"".join(f'<li><a href="#{name}">{escape(EXPERIMENTS[name].title)}</a></li>' for name in done)}</ul>
{"".join(_section(reproduction, name) for name in done)}
<h2>Environment</h2><ul>{"".join(f"<li>{escape(each)}</li>" for each in sorted(environments))}</ul>"""
    write_atomic(reproduction.output / REPORT, pages.page("calm reproduce", body, STYLE).encode())


def _section(reproduction: Reproduction, name: str) -> str:
    experiment, stored = EXPERIMENTS[name], reproduction.results.experiments[name]
    table = reproduction.table(experiment)
    figure = reproduction.output / f"{name}.png"
    png = figure.read_bytes() if figure.exists() else draw(table)  # results.json may be present without figures
    verdicts = "".join(
        f'<tr><td>{escape(v["claim"])}</td><td class="{v["answer"]}">{v["answer"]}</td>'
        f"<td>{escape(v['numbers'])}</td></tr>"
        for v in stored["verdicts"]
    )
    runs = list(dict.fromkeys(measure.run for row in reproduction.rows(experiment) for measure in row.measures))
    configs = "".join(
        f"<details><summary>{escape(reproduction.directory(run).name)}</summary>"
        f"<pre>{escape(to_yaml(run.base_config))}</pre></details>"
        for run in runs
    )
    return f"""<h2 id="{name}">{escape(experiment.title)}</h2>
<p>Paper, {escape(experiment.source)}: {escape(experiment.finding)}</p>
{pages.image(png, experiment.title)}
{pages.table(*cells(table))}
<p class="note">{about_intervals(table)} {escape(experiment.note)}</p>
<table><tr><th>Claim</th><th>Reproduced?</th><th>Evidence</th></tr>{verdicts}</table>
<details><summary>Commands</summary><pre>{escape(chr(10).join(reproduction.commands(experiment)))}</pre></details>
<details><summary>Configurations</summary>{configs}</details>"""


def as_json(table: Table) -> dict[str, Any]:
    """Values and verdicts of an experiment as JSON-serializable objects."""
    rows = [
        {
            "label": line.row.label,
            "series": line.row.series or None,
            "x": line.row.x,
            "values": {name: value._asdict() for name, value in line.values.items()},
            "failed": line.failed,
            "paper": line.row.paper,
        }
        for line in table.lines.values()
    ]
    return {"rows": rows, "verdicts": [verdict._asdict() for verdict in table.experiment.claims(table)]}


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Header and rows. Columns that the paper also reports are followed by the paper's values."""
    columns = [name for name in table.experiment.columns if any(name in line.values for line in table.lines.values())]
    in_paper = {name for line in table.lines.values() for name in line.row.paper}
    header = [""]
    for name in columns:
        title = table.experiment.columns[name]
        header += [title, f"paper: {title}"] if name in in_paper else [title]
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
