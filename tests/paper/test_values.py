"""Verdicts follow from numbers: sums are made up so that the answer is known."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr, t

from calm.evaluate.brier_lm import BrierLM
from calm.paper.experiment import Experiment, Figure, Row
from calm.paper.experiments import EXPERIMENTS
from calm.paper.experiments.brier_correlation import correlations
from calm.paper.figures import _curves, _values, draw
from calm.paper.measures import Measure, cost, reconstruction, scores, step_time, tradeoff
from calm.paper.runs import Run
from calm.paper.scales import SCALES
from calm.paper.tables import cells, document, markdown
from calm.paper.values import FAILED, NO, OPEN, STUDENT, YES, Line, Table, Value, fill

TOY = SCALES["toy"]
RUN = Run("characters-transformer")
DOCUMENTS = 30


def sums(level: float, seed: int = 0, noise: float = 0.0) -> dict:
    """Documents of 100 positions whose Brier-n is level / 2^n, give or take."""
    generator = np.random.default_rng(seed)
    found = {}
    for number in range(DOCUMENTS):
        share = (level + noise * generator.standard_normal()) / 2 ** np.arange(1, 5)
        found[str(number)] = [100.0, *(100 * share), *(100 * share)]  # 2·P(y) - ΣP² = share
    return {"sums": found}


def table(rows: dict[str, list[dict]], claims=lambda table: []):
    experiment = Experiment("e", "E", "here", "f", lambda *_: [], {"brier_lm": "BrierLM"}, Figure(), claims)
    made = [Row(label, (scores(RUN, TOY),), {"brier_lm": 4.7}) for label in rows]
    return fill(experiment, made, {label: [answers] for label, answers in rows.items()})


def test_scores_are_those_of_the_sums():
    found = table({"a": [sums(0.4)]}).lines["a"].values
    assert found["brier_1"].value == pytest.approx(20)
    assert found["brier_4"].value == pytest.approx(2.5)
    assert found["brier_lm"].value == pytest.approx(40 * 2**-2.5)


def test_seeds_are_averaged_and_kept():
    found = table({"a": [sums(0.2), sums(0.4)]}).lines["a"].values["brier_1"]
    assert found.value == pytest.approx(15)
    assert found.by_seed == pytest.approx((10, 20))


@pytest.mark.parametrize(
    ("more", "less", "answer"),
    [
        ([sums(0.4, 1, 0.1)], [sums(0.3, 1, 0.1)], YES),  # the same documents are hard: the difference is exact
        ([sums(0.3, 1, 0.1)], [sums(0.4, 1, 0.1)], NO),
        ([sums(0.4, 1, 0.1)], [sums(0.399, 2, 0.1)], OPEN),  # less than the noise of documents
        ([sums(0.5), sums(0.3)], [sums(0.4), sums(0.31)], OPEN),  # the mean says yes, one seed no
        ([sums(0.5), sums(0.4)], [sums(0.4), sums(0.31)], YES),
    ],
)
def test_an_ordering_holds_if_intervals_and_seeds_say_so(more, less, answer):
    assert table({"a": more, "b": less}).better("a is better", "a", "b").answer == answer


def by_alpha(more: dict, less: dict, repeats: list[dict]) -> Table:
    """Two trainings, and the base model by seed."""
    rows = EXPERIMENTS["alpha"].rows(TOY, lambda measure: None)[:2]
    answers = {row.label: [[answer]] for row, answer in zip(rows, (more, less), strict=True)}
    return fill(EXPERIMENTS["alpha"], rows, answers, repeats)


@pytest.mark.parametrize(("spread", "answer"), [(0.0, YES), (0.001, YES), (0.02, OPEN)])
def test_what_two_seeds_differ_by_decides_nothing(spread, answer):
    """A difference of 0.02 in Brier-1, and seeds that lie up to `spread` from their mean."""
    found = by_alpha(sums(0.34), sums(0.3), [sums(0.3 + shift * 2 * spread) for shift in (-1, 0, 1)])
    assert found.chance("brier_1") == pytest.approx(4.30 * 100 * spread)
    assert found.better("", *found.lines).answer == answer


def test_a_mean_over_seeds_is_surer():
    """Four seeds against one: an error of √(1/4 + 1) standard deviations instead of √2."""
    rows = EXPERIMENTS["alpha"].rows(TOY, lambda measure: None)[:2]
    seeds = [sums(0.3 + shift) for shift in (-0.03, -0.01, 0.01, 0.03)]
    ends = []
    for base in (seeds, [sums(0.3)]):
        answers = {rows[0].label: [base], rows[1].label: [[sums(0.2)]]}
        found = fill(EXPERIMENTS["alpha"], rows, answers, seeds)
        verdict = found.better("", rows[0].label, rows[1].label)
        chance, low = found.chance("brier_lm"), float(verdict.numbers.split("(")[1].split()[0])
        assert chance is not None
        middle = float(verdict.numbers.split("= ")[-1].split()[0])
        ends.append((middle - low) / chance)
    assert ends == pytest.approx([(1 / 4 + 1) ** 0.5, 2**0.5], rel=0.01)  # the numbers have three digits
    assert "(4 seeds)" in cells(fill(EXPERIMENTS["alpha"], rows, answers | {rows[0].label: [seeds]}))[1][0][0]


def test_the_seeds_of_one_training_do_not_matter_where_it_is_sampled_in_two_ways():
    experiment = EXPERIMENTS["sampling-steps"]
    euler, midpoint = (
        next(row for row in experiment.rows(TOY, lambda _: None) if row.label == label)
        for label in ("euler, 4", "midpoint, 4")
    )
    answers = {euler.label: [[sums(0.3)]], midpoint.label: [[sums(0.31)]]}
    found = fill(experiment, [euler, midpoint], answers, [sums(0.1), sums(0.5)])
    assert found.better("", midpoint.label, euler.label).answer == YES


def test_quantiles_are_students():
    assert t.ppf(0.975, range(1, len(STUDENT) + 1)) == pytest.approx(STUDENT, abs=0.006)


def test_an_interval_gets_wider_by_what_chance_adds():
    assert Value(5.0, 2.0, 9.0).wider(4.0) == Value(5.0, 0.0, 5 + 32**0.5)
    assert Value(5.0, None, 8.0).wider(4.0) == Value(5.0, None, 10.0)
    assert Value(5.0, 5.0, 5.0).wider(1.0) == Value(5.0, 4.0, 6.0)


def test_without_a_brier_lm_the_first_score_answers():
    nothing = sums(0.4)
    for total in nothing["sums"].values():
        total[4] = total[8] = 0.0  # never right about four tokens
    found = table({"a": [sums(0.5)], "b": [nothing]})
    assert found.lines["b"].values["brier_lm"].value is None
    verdict = found.better("a is better", "a", "b")
    assert verdict.answer == YES
    assert "no sure BrierLM; Brier-1" in verdict.numbers


def test_a_training_that_diverged_is_worse_than_one_that_did_not():
    found = table({"a": [sums(0.4)], "b": [{FAILED: "ten steps"}], "c": [{FAILED: "ten steps"}]})
    assert found.better("", "a", "b").answer == YES
    assert found.better("", "b", "a").answer == NO
    assert found.better("", "b", "c").answer == OPEN
    assert cells(found)[1][1][1] == "fails"
    assert draw(found).startswith(b"\x89PNG")


def test_correlations_are_scipys():
    generator = np.random.default_rng(0)
    x = generator.standard_normal(20)
    y = -np.exp(x) + 0.3 * generator.standard_normal(20)
    found = correlations(list(x), list(y))
    assert found["Pearson"] == pytest.approx(pearsonr(x, y)[0])
    assert found["Spearman"] == pytest.approx(spearmanr(x, y)[0])


def test_sums_survive_a_file():
    brier = BrierLM.from_json(sums(0.37, 3, 0.05)["sums"])
    again = BrierLM.from_json(brier.as_json())
    for name, score in brier.compute().items():
        if name.startswith("brier"):
            assert again.compute()[name].value == pytest.approx(score.value, abs=1e-5)


def made_up(measure: Measure, place: int) -> dict:
    """An answer of the right form, larger for every row."""
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
def test_every_experiment_has_a_table_a_figure_and_answers(experiment):
    rows = experiment.rows(TOY, lambda measure: made_up(measure, 0))
    found = {row.label: [[made_up(measure, place)] for measure in row.measures] for place, row in enumerate(rows)}
    filled = fill(experiment, rows, found)
    head, body = cells(filled)
    assert len(body) == len(rows)
    assert all(len(row) == len(head) for row in body)
    shown = set(head)
    assert set(experiment.columns.values()) - shown <= {"with exact search"}
    verdicts = experiment.claims(filled)
    assert verdicts
    assert {verdict.answer for verdict in verdicts} <= {YES, NO, OPEN}
    assert draw(filled).startswith(b"\x89PNG")
    text = document(filled, [verdict._asdict() for verdict in verdicts], "calm reproduce", "K = 4")
    assert experiment.finding in text
    assert f"{experiment.name}.png" in text


def test_scores_that_rise_contradict_what_the_paper_says_of_the_exponent_and_those_that_fall_agree():
    experiment = EXPERIMENTS["alpha"]
    rows = experiment.rows(TOY, lambda measure: None)
    answers = []
    for levels in ((0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (None, 0.5, 0.4, 0.3, 0.2, -0.1)):
        found = [{FAILED: "ten steps"} if level is None else sums(level) for level in levels]
        filled = fill(experiment, rows, {row.label: [[one]] for row, one in zip(rows, found, strict=True)})
        answers.append([verdict.answer for verdict in experiment.claims(filled)])
    assert answers == [[NO] * 5, [YES] * 5]


@pytest.mark.parametrize(
    ("levels", "answer", "part"),
    [
        ((0.2, 0.1, 0.05, 0.02), NO, "Brier-1"),
        ((0.0, 0.0, 0.0, 0.0), YES, "Brier-1"),
        ((0.2, -0.1, 0.05, 0.02), YES, "Brier-2"),  # it knows single tokens, and BrierLM is none all the same
        ((0.001, 0.1, 0.1, 0.1), OPEN, "Brier-1"),
    ],
)
def test_what_learns_nothing(levels, answer, part):
    generator = np.random.default_rng(0)
    found = {}
    for number in range(DOCUMENTS):
        share = np.array(levels) + 0.01 * generator.standard_normal() * (np.array(levels) != 0)
        found[str(number)] = [100.0, *(100 * share), *(100 * share)]
    verdict = table({"a": [{"sums": found}]}).learns_nothing("fails", "a")
    assert verdict.answer == answer
    assert part in verdict.numbers


def test_only_rows_of_a_series_are_drawn_as_curves():
    from matplotlib.figure import Figure as Page

    lines = {name: Line(Row(name, (), {}, series, 1.0), {"brier_lm": Value(2.0)}) for name, series in ("ab", ("c", ""))}
    experiment = Experiment("e", "E", "here", "f", lambda *_: [], {}, Figure("x"), lambda _: [])
    axis = Page().subplots()
    _curves(axis, Table(experiment, lines), "brier_lm")
    assert axis.get_legend_handles_labels()[1] == ["b"]


def test_an_interval_without_a_lower_end_is_drawn_down_to_zero():
    line = Line(Row("a", (), {}), {"brier_lm": Value(2.0, None, 3.0), "parameters": Value(5.0)})
    assert _values([line], "brier_lm") == ([2.0], [[2.0], [1.0]])
    assert _values([line], "parameters") == ([5.0], [[0.0], [0.0]])


def test_a_figure_without_scores_says_so():
    experiment = EXPERIMENTS["alpha"]
    rows = experiment.rows(TOY, lambda measure: None)
    filled = fill(experiment, rows, {row.label: [[sums(0.0)]] for row in rows})
    assert draw(filled).startswith(b"\x89PNG")
    assert all("none" in row for row in cells(filled)[1])


def test_markdown_does_not_break_on_bars():
    assert markdown(["", "a"], [["x|y", "1"]]).splitlines()[-1] == "| x\\|y | 1 |"


def test_the_curves_of_one_temperature_and_another():
    """CALM on the Transformer's curve, and beside it."""
    experiment = EXPERIMENTS["temperature-vs-transformer"]
    rows = experiment.rows(TOY, lambda measure: made_up(measure, 0))

    def answers(shift: float) -> dict:
        found = {}
        for row in rows:
            (measure,) = row.measures
            options = dict(measure.options)
            if measure.kind != "tradeoff":
                found[row.label] = [[made_up(measure, 0)]]
                continue
            place = 10 / options["temperature"] if options["candidates"] is None else 12.0 + 0.1 * options["candidates"]
            height = 0.5 * place + (shift if options["candidates"] else 0.0)
            point = made_up(measure, 0) | {"collision_geometric": place, "accuracy_geometric": height}
            found[row.label] = [[point]]
        return found

    on, beside = (experiment.claims(fill(experiment, rows, answers(shift)))[0].answer for shift in (0.05, 1.0))
    assert (on, beside) == (YES, NO)


def test_kinds_of_measures_name_what_they_need():
    below = Run("characters-autoencoder")
    run = Run("characters-calm", (), below)
    assert scores(run, TOY).runs == [below, run]
    assert tradeoff(run, TOY, 0.5, 10).runs == [below, run]
    assert reconstruction(below, TOY).runs == [below]
    assert step_time(run).runs == [below]
    assert cost(run).runs == []
