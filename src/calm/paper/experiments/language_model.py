"""The language model: heads, sampling steps, the energy loss, and the backbone's input."""

from typing import Any

from calm.paper.experiment import BRIERS, TWO_SCORES, Experiment, Figure, Lookup, Row, Table, Verdict
from calm.paper.measures import scores, step_time
from calm.paper.scales import Run, Scale

HEADS = ("energy", "flow", "diffusion", "mean-flow", "chain")
SAMPLING_STEPS = {"euler": (1, 2, 4, 8, 16, 32), "midpoint": (1, 2, 4, 8, 16), "diffusion": (4, 10, 25, 50, 100)}
SAMPLES = {  # (N, M) → BrierLM and relative cost reported in the paper; without M: the closed form, not in the paper
    (2, 100): (4.37, 0.82),
    (4, 100): (4.53, 0.91),
    (8, 100): (4.70, 1.0),
    (12, 100): (4.72, 1.13),
    (8, 1): (4.50, 0.92),
    (8, 16): (4.56, 0.94),
    (8, 200): (4.67, 1.07),
    (8, None): (None, None),
}
ALPHAS = {0.75: "failed", 1.0: 4.70, 1.25: 4.42, 1.5: 4.46, 1.75: 4.30, 2.0: 0}  # BrierLM reported in the paper
INPUTS = {
    "discrete": (21.81, 6.88, 2.59, 1.25, 4.70),
    "continuous": (17.43, 5.04, 1.74, 0.73, 3.25),
    "both": (21.17, 6.49, 2.44, 1.12, 4.40),
}


def with_head(scale: Scale, head: str) -> Run:
    """The base model with another head and a constant learning rate, as in the paper."""
    return scale.calm({"language_model.head": head}).until(1.0)


def head_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    total = scale.calm().steps
    return [
        Row(
            f"{head}, {steps:,} steps",
            (scores(run, scale),),
            {"brier_lm": 4.70} if head == "energy" and steps == total else {},
            head,
            steps,
        )
        for head in HEADS
        for steps, run in scale.training_curve(with_head(scale, head))
    ]


def head_claims(table: Table) -> list[Verdict]:
    first, last = ({head: table.series(head)[end].row.label for head in HEADS} for end in (0, -1))
    ours = "not in the paper: {} is better than energy at the end of training"
    return [
        table.better("energy is better than diffusion at the end of training", last["energy"], last["diffusion"]),
        table.better("flow is better than diffusion at the end of training", last["flow"], last["diffusion"]),
        table.better("energy is better than flow at the end of training", last["energy"], last["flow"]),
        table.better("flow is better than energy at the start of training", first["flow"], first["energy"]),
        table.better(ours.format("mean flow"), last["mean-flow"], last["energy"]),
        table.better(ours.format("chain"), last["chain"], last["energy"]),
    ]


def sampling_steps_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    rows = []
    for sampler, numbers in SAMPLING_STEPS.items():
        run = with_head(scale, "diffusion" if sampler == "diffusion" else "flow")
        options: dict[str, Any] = {} if sampler == "diffusion" else {"sampler": sampler}
        for steps in numbers:
            measure = scores(run, scale, num_sampling_steps=steps, **options)
            rows.append(Row(f"{sampler}, {steps}", (measure,), {}, sampler, steps))
    return [*rows, Row("energy, 1", (scores(with_head(scale, "energy"), scale),), {}, "energy", 1)]


def samples_rows(scale: Scale, lookup: Lookup) -> list[Row]:
    rows = []
    for (model, target), (brier_lm, relative_cost) in SAMPLES.items():
        run = scale.calm({"language_model.num_model_samples": model, "language_model.num_target_samples": target})
        paper = {"brier_lm": brier_lm, "relative_cost": relative_cost}
        rows.append(Row(f"N = {model}, M = {target or '∞'}", (scores(run, scale), step_time(run)), paper))
    return rows


EXPERIMENTS = (
    Experiment(
        name="heads",
        title="Generative heads",
        source="figure “BrierLM scores during training for different heads”",
        finding="Flow matching and energy outperform diffusion. Flow converges faster at first; energy reaches a "
        "higher score.",
        rows=head_rows,
        claims=head_claims,
        figure=Figure("training steps", TWO_SCORES),
        note="The mean-flow and chain heads are not in the paper. The chain head is not likelihood-free.",
    ),
    Experiment(
        name="sampling-steps",
        title="Sampling steps",
        source="figure “Effect of sampling steps”",
        finding="Diffusion needs many steps, flow matching with the midpoint sampler two to four. The energy head "
        "needs one and is better.",
        rows=sampling_steps_rows,
        claims=lambda table: [
            table.better("diffusion needs many steps: 100 are better than 10", "diffusion, 100", "diffusion, 10"),
            table.better("2 midpoint steps are better than 4 Euler steps", "midpoint, 2", "euler, 4"),
            table.better("16 midpoint steps are better than 4 (paper: barely)", "midpoint, 16", "midpoint, 4"),
            table.better("one step of the energy head is better than 16 midpoint steps", "energy, 1", "midpoint, 16"),
        ],
        figure=Figure("sampling steps (a midpoint step evaluates the network twice)", TWO_SCORES, log_x=True),
    ),
    Experiment(
        name="samples",
        title="Samples in the energy loss",
        source="table “Effect of N and M”",
        finding="More samples improve BrierLM and cost more. N = 8 and M = 100 are a good compromise.",
        rows=samples_rows,
        claims=lambda table: [
            table.better("N = 8 is better than N = 2", "N = 8, M = 100", "N = 2, M = 100"),
            table.better("N = 8 is better than N = 4", "N = 8, M = 100", "N = 4, M = 100"),
            table.better("N = 12 is better than N = 8 (paper: barely)", "N = 12, M = 100", "N = 8, M = 100"),
            table.better("M = 100 is better than M = 1", "N = 8, M = 100", "N = 8, M = 1"),
            table.better("M = 100 is better than M = 16", "N = 8, M = 100", "N = 8, M = 16"),
            table.better("the closed form is better than M = 100", "N = 8, M = ∞", "N = 8, M = 100"),
        ],
        columns={**BRIERS, "step_seconds": "seconds per step", "relative_cost": "relative cost"},
        figure=Figure(panels={"brier_lm": "BrierLM (percent)", "relative_cost": "relative time per step"}),
        cost_baseline="N = 8, M = 100",
        note="M = ∞ is the closed form of the target term, which is the default in this package. Times are CPU time "
        "per training step.",
    ),
    Experiment(
        name="alpha",
        title="Exponent of the energy score",
        source="table “Effect of the exponent α”",
        finding="Training fails for α < 1. α = 1 is best, values up to 1.75 are slightly worse, and BrierLM is 0 at "
        "α = 2.",
        rows=lambda scale, _: [
            Row(
                f"α = {alpha:g}",
                (scores(scale.calm({"language_model.alpha": alpha}), scale),),
                {"brier_lm": reported},
                "energy head",
                alpha,
            )
            for alpha, reported in ALPHAS.items()
        ],
        claims=lambda table: [
            table.fails_to_learn("training fails for α < 1", "α = 0.75"),
            table.better("α = 1 is better than 1.25", "α = 1", "α = 1.25"),
            table.better("α = 1 is better than 1.5", "α = 1", "α = 1.5"),
            table.better("α = 1 is better than 1.75", "α = 1", "α = 1.75"),
            table.fails_to_learn("α = 2 learns nothing: the score is not strictly proper", "α = 2"),
        ],
        figure=Figure("exponent α of the energy score", TWO_SCORES),
    ),
    Experiment(
        name="model-input",
        title="Backbone input",
        source="table “Effect of model input”",
        finding="Discrete input is best, both slightly worse, continuous input much worse.",
        rows=lambda scale, _: [
            Row(
                kind,
                (scores(scale.calm({"language_model.model_input": kind}), scale),),
                dict(zip(BRIERS, reported, strict=True)),
            )
            for kind, reported in INPUTS.items()
        ],
        claims=lambda table: [
            table.better("discrete input is better than continuous input", "discrete", "continuous"),
            table.better("discrete input alone is better than both", "discrete", "both"),
            table.better("both are better than continuous input alone", "both", "continuous"),
        ],
        figure=Figure(panels=TWO_SCORES),
    ),
)
