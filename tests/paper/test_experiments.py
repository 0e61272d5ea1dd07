"""Verdicts on synthetic sums with known answers."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr, t

from calm.evaluate.brier_lm import BrierLM
from calm.paper.experiment import (
    FAILED,
    NO,
    T_95,
    UNDECIDED,
    YES,
    Experiment,
    Figure,
    Line,
    Row,
    Table,
    Value,
    build_table,
)
from calm.paper.experiments import EXPERIMENTS
from calm.paper.experiments.main import correlations
from calm.paper.figures import _curves, _values, draw
from calm.paper.measures import Measure, cost, reconstruction, scores, step_time, tradeoff
from calm.paper.report import cells, document, markdown
from calm.paper.scales import SCALES, Run

TOY = SCALES["toy"]
RUN = Run("characters-transformer")
DOCUMENTS = 30


def sums(level: float, seed: int = 0, noise: float = 0.0) -> dict:
    """Documents of 100 positions with a Brier-n of level / 2^n plus noise."""
    generator = np.random.default_rng(seed)
    documents = {}
    for number in range(DOCUMENTS):
        share = (level + noise * generator.standard_normal()) / 2 ** np.arange(1, 5)
        documents[str(number)] = [100.0, *(100 * share), *(100 * share)]  # 2·P(y) - ΣP² = share
    return {"sums": documents}


def table(rows: dict[str, list[dict]], claims=lambda table: []):
    experiment = Experiment("e", "E", "here", "f", lambda *_: [], claims, {"brier_lm": "BrierLM"})
    table_rows = [Row(label, (scores(RUN, TOY),), {"brier_lm": 4.7}) for label in rows]
    return build_table(experiment, table_rows, {label: [answers] for label, answers in rows.items()})


def test_scores_follow_from_sums():
    values = table({"a": [sums(0.4)]}).lines["a"].values
    assert values["brier_1"].value == pytest.approx(20)
    assert values["brier_4"].value == pytest.approx(2.5)
    assert values["brier_lm"].value == pytest.approx(40 * 2**-2.5)


def test_seeds_are_averaged_and_kept():
    values = table({"a": [sums(0.2), sums(0.4)]}).lines["a"].values["brier_1"]
    assert values.value == pytest.approx(15)
    assert values.by_seed == pytest.approx((10, 20))


@pytest.mark.parametrize(
    ("more", "less", "answer"),
    [
        ([sums(0.4, 1, 0.1)], [sums(0.3, 1, 0.1)], YES),  # same noise per document: the paired difference is exact
        ([sums(0.3, 1, 0.1)], [sums(0.4, 1, 0.1)], NO),
        ([sums(0.4, 1, 0.1)], [sums(0.399, 2, 0.1)], UNDECIDED),  # smaller than the noise
        ([sums(0.5), sums(0.3)], [sums(0.4), sums(0.31)], UNDECIDED),  # one seed contradicts the mean
        ([sums(0.5), sums(0.4)], [sums(0.4), sums(0.31)], YES),
    ],
)
def test_ordering_requires_interval_and_all_seeds(more, less, answer):
    assert table({"a": more, "b": less}).better("a is better", "a", "b").answer == answer


def by_alpha(more: dict, less: dict, repeats: list[dict]) -> Table:
    """A table of two runs, with repeats of the base model."""
    rows = EXPERIMENTS["alpha"].rows(TOY, lambda measure: None)[:2]
    answers = {row.label: [[answer]] for row, answer in zip(rows, (more, less), strict=True)}
    return build_table(EXPERIMENTS["alpha"], rows, answers, repeats)


@pytest.mark.parametrize(("spread", "answer"), [(0.0, YES), (0.001, YES), (0.02, UNDECIDED)])
def test_differences_within_seed_variance_are_undecided(spread, answer):
    """A difference of 0.02 in Brier-1; seeds deviate from their mean by up to `spread`."""
    result = by_alpha(sums(0.34), sums(0.3), [sums(0.3 + shift * 2 * spread) for shift in (-1, 0, 1)])
    assert result.seed_margin("brier_1") == pytest.approx(4.30 * 100 * spread)
    assert result.better("", *result.lines).answer == answer


def test_mean_over_seeds_has_narrower_interval():
    """Four seeds against one: an error of √(1/4 + 1) standard deviations instead of √2."""
    rows = EXPERIMENTS["alpha"].rows(TOY, lambda measure: None)[:2]
    seeds = [sums(0.3 + shift) for shift in (-0.03, -0.01, 0.01, 0.03)]
    ends = []
    for base in (seeds, [sums(0.3)]):
        answers = {rows[0].label: [base], rows[1].label: [[sums(0.2)]]}
        result = build_table(EXPERIMENTS["alpha"], rows, answers, seeds)
        verdict = result.better("", rows[0].label, rows[1].label)
        margin, low = result.seed_margin("brier_lm"), float(verdict.numbers.split("(")[1].split()[0])
        assert margin is not None
        middle = float(verdict.numbers.split("= ")[-1].split()[0])
        ends.append((middle - low) / margin)
    assert ends == pytest.approx([(1 / 4 + 1) ** 0.5, 2**0.5], rel=0.01)  # numbers are printed with three digits
    assert "(4 seeds)" in cells(build_table(EXPERIMENTS["alpha"], rows, answers | {rows[0].label: [seeds]}))[1][0][0]


def test_seed_variance_does_not_apply_to_two_samplers_of_one_run():
    experiment = EXPERIMENTS["sampling-steps"]
    euler, midpoint = (
        next(row for row in experiment.rows(TOY, lambda _: None) if row.label == label)
        for label in ("euler, 4", "midpoint, 4")
    )
    answers = {euler.label: [[sums(0.3)]], midpoint.label: [[sums(0.31)]]}
    result = build_table(experiment, [euler, midpoint], answers, [sums(0.1), sums(0.5)])
    assert result.better("", midpoint.label, euler.label).answer == YES


def test_t_quantiles():
    assert t.ppf(0.975, range(1, len(T_95) + 1)) == pytest.approx(T_95, abs=0.006)


def test_widened_intervals():
    assert Value(5.0, 2.0, 9.0).widened(4.0) == Value(5.0, 0.0, 5 + 32**0.5)
    assert Value(5.0, None, 8.0).widened(4.0) == Value(5.0, None, 10.0)
    assert Value(5.0, 5.0, 5.0).widened(1.0) == Value(5.0, 4.0, 6.0)


def test_brier_1_decides_if_brier_lm_is_undefined():
    undefined = sums(0.4)
    for total in undefined["sums"].values():
        total[4] = total[8] = 0.0  # never predicts four tokens correctly
    result = table({"a": [sums(0.5)], "b": [undefined]})
    assert result.lines["b"].values["brier_lm"].value is None
    verdict = result.better("a is better", "a", "b")
    assert verdict.answer == YES
    assert "BrierLM may be undefined; Brier-1" in verdict.numbers


def test_diverged_training_is_worse():
    result = table({"a": [sums(0.4)], "b": [{FAILED: "ten steps"}], "c": [{FAILED: "ten steps"}]})
    assert result.better("", "a", "b").answer == YES
    assert result.better("", "b", "a").answer == NO
    assert result.better("", "b", "c").answer == UNDECIDED
    assert cells(result)[1][1][1] == "failed"
    assert draw(result).startswith(b"\x89PNG")


def test_correlations_match_scipy():
    generator = np.random.default_rng(0)
    x = generator.standard_normal(20)
    y = -np.exp(x) + 0.3 * generator.standard_normal(20)
    coefficients = correlations(list(x), list(y))
    assert coefficients["Pearson"] == pytest.approx(pearsonr(x, y)[0])
    assert coefficients["Spearman"] == pytest.approx(spearmanr(x, y)[0])


def test_sums_round_trip_through_json():
    brier = BrierLM.from_json(sums(0.37, 3, 0.05)["sums"])
    again = BrierLM.from_json(brier.as_json())
    for name, score in brier.compute().items():
        if name.startswith("brier"):
            assert again.compute()[name].value == pytest.approx(score.value, abs=1e-5)


def synthetic(measure: Measure, place: int) -> dict:
    """A result of the right format, with values that increase by row."""
    level = 0.1 + 0.01 * place
    error = {f"{name}_geometric_error": 0.1 for name in ("accuracy", "collision")}
    plane = {name: [10.0 + place] * 4 for name in ("accuracy", "collision")}
    return {
        "scores": {**sums(level, 1, 0.02), "cross_entropy": 3 - level},
        "reconstruction": {
            **{"token_accuracy": 0.99, "tokens": 1000, "collapsed_dimensions": 3},
            **{"mean_sigma": 0.2, "latent_size": 32},
        },
        "tradeoff": {
            **plane,
            **{f"{name}_geometric": 5.0 + place for name in plane},
            **{f"{name}_error": [0.2] * 4 for name in plane},
            **error,
        },
        "step-time": {"step_seconds": 1.0 + place},
        "cost": {
            **{"parameters": 1_000_000 * (1 + place), "train_flops": 1e12 * (1 + place), "inference_flops": 1e6},
            **{"inference_flops_with_candidates": 2e8, "inference_flops_with_search": None},
        },
    }[measure.kind]


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda experiment: experiment.name)
def test_every_experiment_has_table_figure_and_verdicts(experiment):
    rows = experiment.rows(TOY, lambda measure: synthetic(measure, 0))
    results = {row.label: [[synthetic(measure, place)] for measure in row.measures] for place, row in enumerate(rows)}
    filled = build_table(experiment, rows, results)
    head, body = cells(filled)
    assert len(body) == len(rows)
    assert all(len(row) == len(head) for row in body)
    titles = set(head)
    assert set(experiment.columns.values()) - titles <= {"with exact vocabulary search"}
    verdicts = experiment.claims(filled)
    assert verdicts
    assert {verdict.answer for verdict in verdicts} <= {YES, NO, UNDECIDED}
    assert draw(filled).startswith(b"\x89PNG")
    text = document(filled, [verdict._asdict() for verdict in verdicts], "calm reproduce", "K = 4")
    assert experiment.finding in text
    assert f"{experiment.name}.png" in text


def test_alpha_verdicts_for_increasing_and_decreasing_scores():
    experiment = EXPERIMENTS["alpha"]
    rows = experiment.rows(TOY, lambda measure: None)
    answers = []
    for levels in ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (None, 0.5, 0.4, 0.3, 0.2, -0.1)):
        results = [{FAILED: "ten steps"} if level is None else sums(level) for level in levels]
        filled = build_table(experiment, rows, {row.label: [[one]] for row, one in zip(rows, results, strict=True)})
        answers.append([verdict.answer for verdict in experiment.claims(filled)])
    assert answers == [[NO] * 5, [YES] * 5]


@pytest.mark.parametrize(
    ("levels", "answer", "part"),
    [
        ((0.2, 0.1, 0.05, 0.02), NO, "Brier-1"),
        ((0.0, 0.0, 0.0, 0.0), YES, "Brier-1"),
        ((0.2, -0.1, 0.05, 0.02), YES, "Brier-2"),  # predicts single tokens, but BrierLM is undefined
        ((0.001, 0.1, 0.1, 0.1), UNDECIDED, "Brier-1"),
    ],
)
def test_fails_to_learn(levels, answer, part):
    generator = np.random.default_rng(0)
    documents = {}
    for number in range(DOCUMENTS):
        share = np.array(levels) + 0.01 * generator.standard_normal() * (np.array(levels) != 0)
        documents[str(number)] = [100.0, *(100 * share), *(100 * share)]
    verdict = table({"a": [{"sums": documents}]}).fails_to_learn("fails", "a")
    assert verdict.answer == answer
    assert part in verdict.numbers


def test_curves_only_contain_rows_with_a_series():
    from matplotlib.figure import Figure as Page

    lines = {name: Line(Row(name, (), {}, series, 1.0), {"brier_lm": Value(2.0)}) for name, series in ("ab", ("c", ""))}
    experiment = Experiment("e", "E", "here", "f", lambda *_: [], lambda _: [], {}, Figure("x"))
    axis = Page().subplots()
    _curves(axis, Table(experiment, lines), "brier_lm")
    assert axis.get_legend_handles_labels()[1] == ["b"]


def test_error_bar_without_lower_bound_extends_to_zero():
    line = Line(Row("a", (), {}), {"brier_lm": Value(2.0, None, 3.0), "parameters": Value(5.0)})
    assert _values([line], "brier_lm") == ([2.0], [[2.0], [1.0]])
    assert _values([line], "parameters") == ([5.0], [[0.0], [0.0]])


def test_undefined_scores():
    experiment = EXPERIMENTS["alpha"]
    rows = experiment.rows(TOY, lambda measure: None)
    filled = build_table(experiment, rows, {row.label: [[sums(0.0)]] for row in rows})
    assert draw(filled).startswith(b"\x89PNG")
    assert all("undefined" in row for row in cells(filled)[1])


def test_markdown_escapes_pipes():
    assert markdown(["", "a"], [["x|y", "1"]]).splitlines()[-1] == "| x\\|y | 1 |"


def test_temperature_vs_transformer_verdict():
    """CALM on the Transformer's curve, and off it."""
    experiment = EXPERIMENTS["temperature-vs-transformer"]
    rows = experiment.rows(TOY, lambda measure: synthetic(measure, 0))

    def answers(shift: float) -> dict:
        results = {}
        for row in rows:
            (measure,) = row.measures
            options = dict(measure.options)
            if measure.kind != "tradeoff":
                results[row.label] = [[synthetic(measure, 0)]]
                continue
            place = 10 / options["temperature"] if options["candidates"] is None else 12.0 + 0.1 * options["candidates"]
            height = 0.5 * place + (shift if options["candidates"] else 0.0)
            point = synthetic(measure, 0) | {"collision_geometric": place, "accuracy_geometric": height}
            results[row.label] = [[point]]
        return results

    on, off = (experiment.claims(build_table(experiment, rows, answers(shift)))[0].answer for shift in (0.05, 1.0))
    assert (on, off) == (YES, NO)


def test_runs_required_by_each_kind_of_measure():
    autoencoder = Run("characters-autoencoder")
    run = Run("characters-calm", (), autoencoder)
    assert scores(run, TOY).runs == [autoencoder, run]
    assert tradeoff(run, TOY, 0.5, 10).runs == [autoencoder, run]
    assert reconstruction(autoencoder, TOY).runs == [autoencoder]
    assert step_time(run).runs == [autoencoder]
    assert cost(run).runs == []
