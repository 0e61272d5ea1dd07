"""Accuracy-diversity trade-off by number of candidates and by temperature (Algorithm 2)."""

from calm.paper.experiment import Experiment, Figure, Lookup, Row
from calm.paper.measures import tradeoff
from calm.paper.scales import Scale
from calm.paper.values import NO, UNDECIDED, YES, Line, Table, Verdict

TRADEOFF = {"accuracy": "accuracy (%)", "collision": "collision (%)"}
FIRST = {"accuracy_1": "accuracy, first token", "collision_1": "collision, first token"}
BY_CANDIDATES = "T = 1/3, candidates N"


def by_candidates(scale: Scale) -> list[Row]:
    run = scale.calm()
    return [Row(f"T = 1/3, N = {n}", (tradeoff(run, scale, 1 / 3, n),), {}, BY_CANDIDATES, n) for n in scale.candidates]


def rows(scale: Scale, lookup: Lookup) -> list[Row]:
    fixed = scale.candidates[-2]
    by_temperature = [
        Row(
            f"N = {fixed}, T = 1/{n}",
            (tradeoff(scale.calm(), scale, 1 / n, fixed),),
            {},
            f"N = {fixed}, temperature 1/n",
            n,
        )
        for n in (2, 3, 4, 5, 6)
    ]
    return by_candidates(scale) + by_temperature


def claims(table: Table) -> list[Verdict]:
    candidates = table.series(BY_CANDIDATES)
    temperatures = [line for line in table.lines.values() if line not in candidates]
    trends = [
        _increase("more candidates increase accuracy", candidates),
        _increase("more candidates reduce diversity", candidates, "collision"),
    ]
    spans = [_span(lines) for lines in (candidates, temperatures)]
    numbers = f"collision spans {spans[0]:.2f} percentage points across N and {spans[1]:.2f} across T"
    return [*trends, Verdict("N covers a wider range than T", YES if spans[0] > spans[1] else NO, numbers)]


def _increase(claim: str, lines: list[Line], column: str = "accuracy") -> Verdict:
    """Test whether the last point of a curve is above the first, with disjoint intervals."""
    first, last = (lines[index].values[column].bounds for index in (0, -1))
    formatted = [f"{value:.2f} ({low:.2f} to {high:.2f})" for low, value, high in (first, last)]
    answer = YES if last[0] > first[2] else NO if last[2] < first[0] else UNDECIDED
    return Verdict(claim, answer, f"{column} {formatted[0]} → {formatted[1]}")


def _span(lines: list[Line]) -> float:
    values = [line.values["collision"].bounds[1] for line in lines]
    return max(values) - min(values)


EXPERIMENT = Experiment(
    "temperature-tradeoff",
    "Candidates and temperature",
    "figure “The accuracy-diversity trade-off”",
    "More candidates and lower temperatures increase accuracy and reduce diversity. The number of candidates covers a "
    "wider range.",
    rows,
    TRADEOFF | FIRST,
    Figure("collision (percent; lower is more diverse)", {"accuracy": "accuracy (percent)"}, x_column="collision"),
    claims,
    repeat=None,
    chunk_sizes=(4,),
    note="Geometric means over 1- to 4-grams, as in the paper. Algorithm 2 samples whole chunks.",
)
