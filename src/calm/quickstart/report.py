"""The report of a quickstart: one self-contained HTML file."""

from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

from calm.config import CONFIG_FILE
from calm.pages import image, page, table
from calm.quickstart import figures
from calm.quickstart.plan import model_of
from calm.scores.brier import MAX_NGRAM

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
    seconds = {stage: figures.curve(output / "runs" / stage)[0][-1] for stage in ("calm", "transformer")}
    steps = results["reconstruction"]["training_steps"]
    text = "the embedded King James Bible" if plan["data"] == ["embedded"] else ", ".join(plan["data"])
    calm, baseline = (scores["models"][name] for name in ("calm", "transformer"))
    first = [model["brier_1"]["value"] for model in (calm, baseline)]
    body = f"""<h1>calm quickstart</h1>
<p class="note">{escape(text)} · {plan["minutes"]:g} minutes planned · seed {plan["seed"]}</p>
<p>The autoencoder maps 4 tokens to one vector and back. The CALM language model predicts the next chunk of 4 tokens
in one backbone step; its chain head uses the token embeddings of the autoencoder. The baseline, a standard Transformer
with the same backbone, predicts the next token. The chain head predicts tokens by softmax: it is not likelihood-free.
Training took {seconds["calm"] / 60:.1f} minutes for CALM and {seconds["transformer"] / 60:.1f} for the Transformer,
excluding evaluations and the {steps:,} steps of the autoencoder. The plan gives both the same time; other programs on
the machine can change that. Brier-1 on test text is {first[0]:.2f} for CALM and {first[1]:.2f} for the Transformer.</p>
<h2>Learning</h2>
<div class="row">{image(figures.learning_curves(output), "Brier-1 over training time")}
{image(figures.reconstruction(results["reconstruction"], output), "Reconstruction accuracy under noise")}</div>
<p class="note">Left: Brier-1 on validation text. Right: reconstruction accuracy of the autoencoder under increasing
noise. It reconstructs {results["reconstruction"]["token_accuracy"]:.2%} of the tokens from samples of its
posterior.</p>
<h2>BrierLM</h2>
<p>Higher is better: an uninformed model scores 0, a perfect one 100. Brier-n treats n consecutive tokens as one
outcome.</p>
{_scores(scores)}
{image(figures.scores(scores, output), "Brier scores with intervals")}
<h2>Temperature</h2>
{image(figures.tradeoff(results["tradeoff"]), "Accuracy over collision")}
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
    return (
        f"calm generate {model} 'And it came to pass' --temperature 0.5 --show-chunks\n"
        f"calm evaluate {model} {baseline} --data {data} --split test --samples 16\n"
        f"calm train {quote(str(output / 'runs' / 'calm' / CONFIG_FILE))} --set train.steps=5000 --output runs/longer\n"
    )


def _scores(answer: dict[str, Any]) -> str:
    names = {f"brier_{n}": f"Brier-{n}" for n in range(1, MAX_NGRAM + 1)} | {"brier_lm": "BrierLM"}
    rows = [[title, *(_score(model[name]) for model in answer["models"].values())] for name, title in names.items()]
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
