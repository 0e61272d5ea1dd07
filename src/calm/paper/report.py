"""What a reproduction writes: a Markdown table and a figure an experiment, and one HTML report over all."""

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


def write_experiment(made: Reproduction, experiment: Experiment) -> bool:
    """Its table and figure, if they are not written already; whether there was anything new."""
    name, scale = experiment.name, made.scale
    figure, follows_from = made.output / f"{name}.png", made.digest(experiment)
    if figure.exists() and made.results.experiments.get(name, {}).get("digest") == follows_from:
        return False
    table = made.table(experiment)
    numbers = {"digest": follows_from, **as_json(table)}
    command = f"calm reproduce {name} --scale {scale.name}"
    if scale.has_other_chunks:
        command += f" --chunk-size {scale.chunk_size}"
    seeds = f"seeds {', '.join(map(str, scale.seeds))}"
    text = document(table, numbers["verdicts"], command, f"K = {scale.chunk_size}, {seeds}")
    write_atomic(figure, draw(table))
    write_atomic(made.output / f"{name}.md", text.encode())
    made.results.experiments[name] = numbers
    made.results.write()
    return True


def write_report(made: Reproduction) -> Path:
    """All experiments that are done, in the paper's order; those that want more than when they were written are not."""
    kept = made.results.experiments
    done = [name for name, experiment in EXPERIMENTS.items() if name in kept and not made.wanted(experiment)]
    makers = {
        f"{kept['hardware']}; " + ", ".join(f"{k} {v}" for k, v in kept["versions"].items())
        for kept in made.results.measures.values()
    }
    body = f"""<h1>The paper, reproduced</h1>
<p class="note">scale {escape(made.results.header["scale"])}: {escape(made.scale.about)}</p>
<ul>{"".join(f'<li><a href="#{name}">{escape(EXPERIMENTS[name].title)}</a></li>' for name in done)}</ul>
{"".join(_section(made, name) for name in done)}
<h2>Made on</h2><ul>{"".join(f"<li>{escape(maker)}</li>" for maker in sorted(makers))}</ul>"""
    path = made.output / REPORT
    write_atomic(path, pages.page("calm reproduce", body, STYLE).encode())
    return path


def _section(made: Reproduction, name: str) -> str:
    experiment, kept = EXPERIMENTS[name], made.results.experiments[name]
    table = made.table(experiment)
    figure = made.output / f"{name}.png"
    picture = figure.read_bytes() if figure.exists() else draw(table)  # results may have come without their figures
    verdicts = "".join(
        f'<tr><td>{escape(v["claim"])}</td><td class="{v["answer"]}">{v["answer"]}</td>'
        f"<td>{escape(v['numbers'])}</td></tr>"
        for v in kept["verdicts"]
    )
    runs = list(dict.fromkeys(measure.run for row in made.rows(experiment) for measure in row.measures))
    configs = "".join(
        f"<details><summary>{escape(made.directory(run).name)}</summary>"
        f"<pre>{escape(to_yaml(run.plain))}</pre></details>"
        for run in runs
    )
    return f"""<h2 id="{name}">{escape(experiment.title)}</h2>
<p>The paper, {escape(experiment.place)}: {escape(experiment.finding)}</p>
{pages.image(picture, experiment.title)}
{pages.table(*cells(table))}
<p class="note">{about_intervals(table)} {escape(experiment.note)}</p>
<table><tr><th>does it hold here?</th><th></th><th></th></tr>{verdicts}</table>
<details><summary>commands</summary><pre>{escape(chr(10).join(made.commands(experiment)))}</pre></details>
<details><summary>configurations</summary>{configs}</details>"""
