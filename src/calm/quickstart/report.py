"""The report of a quickstart: one self-contained HTML file."""

import sys
from html import escape
from pathlib import Path
from shlex import quote
from shutil import which
from typing import Any

from calm.config import CONFIG_FILE, load_config
from calm.evaluate.plots import plot_robustness, plot_scores
from calm.pages import image, page, table
from calm.paper.experiment import BRIERS
from calm.paper.figures import png
from calm.quickstart.plan import model_of
from calm.train.tracking import METRICS, read_metrics

COLORS = {"calm": "tab:blue", "transformer": "tab:orange"}

STYLE = """
.row { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; margin: 1rem 0; }
.row > * { flex: 1 1 24rem; min-width: 0; }
.text { border: 1px solid var(--soft); border-radius: .4rem; padding: .6rem .8rem; white-space: pre-wrap; }
.prompt { font-weight: 600; }
mark { color: #111; padding: .1rem 0; border-radius: .15rem; }
mark:nth-of-type(4n+1) { background: #a5d8ff; } mark:nth-of-type(4n+2) { background: #ffec99; }
mark:nth-of-type(4n+3) { background: #b2f2bb; } mark:nth-of-type(4n+4) { background: #eebefa; }
"""


def make_report(results: dict[str, Any], output: Path) -> str:
    """The HTML report, from the results of all stages and the metrics in `output`."""
    plan, scores = results["plan"], results["scores"]
    curves = {stage: _learning_curve(output / "runs" / stage) for stage in COLORS}
    minutes = {stage: curve[-1][0] for stage, curve in curves.items()}
    steps = results["reconstruction"]["training_steps"]
    text = "the embedded King James Bible" if plan["data"] == ["embedded"] else ", ".join(plan["data"])
    first = [scores["models"][stage]["brier_1"]["value"] for stage in COLORS]
    plots = {name: output / "results" / f"{name}.png" for name in ("reconstruction", "scores")}
    plot_robustness(results["reconstruction"], plots["reconstruction"])
    plot_scores(scores, plots["scores"])
    body = f"""<h1>calm quickstart</h1>
<p class="note">{escape(text)} · {plan["minutes"]:g} minutes planned · seed {plan["seed"]}</p>
<p>The autoencoder maps 4 tokens to one vector and back. The CALM language model predicts the next chunk of 4 tokens
in one backbone step; its probit head draws the chunk as one vector, in one pass from noise to the states that decode to
its tokens. Sampling is likelihood-free; training uses the cross-entropy of tokens. The baseline, a standard Transformer
with the same backbone, predicts the next token by softmax.
Training took {minutes["calm"]:.1f} minutes for CALM and {minutes["transformer"]:.1f} for the Transformer,
excluding evaluations and the {steps:,} steps of the autoencoder. The plan gives both the same time; other programs on
the machine can change that. Brier-1 on test text is {first[0]:.2f} for CALM and {first[1]:.2f} for the Transformer.</p>
<h2>Learning</h2>
<div class="row">{image(_plot_curves(curves), "Brier-1 over training time")}
{image(plots["reconstruction"].read_bytes(), "Reconstruction accuracy under noise")}</div>
<p class="note">Left: Brier-1 on validation text. Right: reconstruction accuracy of the autoencoder under increasing
noise. It reconstructs {results["reconstruction"]["token_accuracy"]:.2%} of the tokens from samples of its
posterior.</p>
<h2>BrierLM</h2>
<p>Higher is better: an uninformed model scores 0, a perfect one 100. Brier-n treats n consecutive tokens as one
outcome.</p>
{_scores(scores)}
{image(plots["scores"].read_bytes(), "Brier scores with intervals")}
<h2>Temperature</h2>
{image(_plot_tradeoff(results["tradeoff"]), "Accuracy over collision")}
<p class="note">Lower temperatures increase accuracy and reduce diversity. First token of a chunk at
{len(results["tradeoff"]) // 2} temperatures; error bars show one standard error.</p>
<h2>Samples</h2>
<p>Continuations of the beginnings of test documents, not selected: CALM on the left, the Transformer on the right. Each
color is one chunk, generated in one backbone step.</p>
{"".join(_sample(sample) for sample in results["samples"])}
<h2>Cost</h2>
{_costs(results["costs"])}
<h2>Next</h2>
<pre>{escape(next_commands(output))}</pre>"""
    return page("calm quickstart", body, STYLE)


def next_commands(output: Path) -> str:
    """Suggested commands to continue with, one per line."""
    model, baseline, data = (
        quote(str(path)) for path in (model_of(output, "calm"), model_of(output, "transformer"), output / "data")
    )
    config = quote(str(output / "runs" / "calm" / CONFIG_FILE))
    called = Path(sys.argv[0])  # as by `make demo`, whose environment is not activated
    calm = quote(str(called)) if called.name == "calm" and which("calm") is None else "calm"
    return (
        f"{calm} generate {model} 'And it came to pass' --temperature 0.5 --show-chunks\n"
        f"{calm} evaluate {model} {baseline} --data {data} --split test --samples 16\n"
        f"{calm} train {config} --set train.steps=5000 --output runs/longer\n"
    )


def _learning_curve(run: Path) -> list[tuple[float, float]]:
    """Training time in minutes, excluding evaluations, and validation Brier-1, at each evaluation."""
    data = load_config(str(run / CONFIG_FILE)).data
    tokens_per_step = data.batch_size * data.sequence_length
    seconds, last_step, points = 0.0, 0, []
    for line in read_metrics(run / METRICS):
        if line.get("tokens_per_second"):
            seconds += (line["step"] - last_step) * tokens_per_step / line["tokens_per_second"]
            last_step = line["step"]
        if "brier_1" in line:
            points.append((seconds / 60, line["brier_1"]))
    return points


def _plot_curves(curves: dict[str, list[tuple[float, float]]]) -> bytes:
    """Validation Brier-1 over training time."""
    figure, axis = _figure("training time (minutes)", "validation Brier-1 (percent)")
    for stage, points in curves.items():
        axis.plot(*zip(*points, strict=True), "o-", color=COLORS[stage], label=stage)
    axis.legend()
    return png(figure, dpi=120)


def _plot_tradeoff(points: list[dict[str, Any]]) -> bytes:
    """Accuracy over collision of the first token, one curve per model."""
    figure, axis = _figure("collision of two samples (percent; lower is more diverse)", "accuracy (percent)")
    for model, color in COLORS.items():
        selected = [point for point in points if point["model"] == model]
        xs, ys, errors = ([p[name][0] for p in selected] for name in ("collision", "accuracy", "accuracy_error"))
        axis.errorbar(xs, ys, errors, fmt="o-", color=color, capsize=3, label=model)
        for point, x, y in zip(selected, xs, ys, strict=True):
            axis.annotate(f"{point['temperature']:g}", (x, y), textcoords="offset points", xytext=(5, -11), size=8)
    axis.legend(title="points labeled by temperature")
    return png(figure, dpi=120)


def _figure(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=x, ylabel=y)
    axis.grid(alpha=0.3)
    return figure, axis


def _scores(answer: dict[str, Any]) -> str:
    rows = [[title, *(_score(model[name]) for model in answer["models"].values())] for name, title in BRIERS.items()]
    return table(["percent (95% interval)", *answer["models"]], rows)


def _score(score: dict[str, Any]) -> str:
    if score["value"] is None:
        return "undefined: a Brier-n is not positive"
    low, high = (f"{score[bound]:.2f}" if score[bound] is not None else "?" for bound in ("low", "high"))
    return f"{score['value']:.2f}  ({low} to {high})"


def _sample(sample: dict[str, Any]) -> str:
    prompt = f'<span class="prompt">{escape(sample["prompt"])}</span>'
    chunks = "".join(f"<mark>{escape(chunk)}</mark>" for chunk in sample["calm"])
    return f"""<p class="note">temperature {sample["temperature"]:g}</p><div class="row">
<div class="text">{prompt}{chunks}</div>
<div class="text">{prompt}{escape(sample["transformer"])}</div></div>"""


def _costs(costs: list[dict[str, Any]]) -> str:
    rows = [
        [
            cost["name"],
            f"{cost['parameters'] / 1e6:.1f} M",
            f"{cost['train_flops']:.2e}",
            f"{cost['inference_flops_per_token']:.2e}",
        ]
        for cost in costs
    ]
    return table(["", "parameters", "training FLOPs", "inference FLOPs per token"], rows)
