"""Output files of a reproduction: a Markdown table and a figure per experiment, and one HTML report."""

from html import escape
from pathlib import Path

from calm import pages
from calm.config import to_yaml
from calm.files import write_atomic
from calm.paper.experiment import Experiment
from calm.paper.experiments import EXPERIMENTS
from calm.paper.figures import draw
from calm.paper.reproduce import Reproduction, as_json
from calm.paper.tables import about_intervals, cells, document

REPORT = "report.html"
STYLE = ".yes { color: #2a8c4a; } .no { color: #c0392b; } details { margin: .6rem 0; }"


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


def write_report(reproduction: Reproduction) -> Path:
    """Write the HTML report of all experiments without pending measures, in the paper's order. Returns its path."""
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
    path = reproduction.output / REPORT
    write_atomic(path, pages.page("calm reproduce", body, STYLE).encode())
    return path


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
