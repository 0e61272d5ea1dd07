"""Definition of an experiment: table rows and their measures, the paper's numbers, a figure, and testable claims."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calm.paper.measures import Measure, repeated
from calm.paper.scales import CHUNK_SIZES, Scale

if TYPE_CHECKING:
    from calm.paper.values import Table, Verdict

Lookup = Callable[[Measure], dict[str, Any] | None]  # returns the stored result of a measure, if any

BRIERS = {f"brier_{n}": f"Brier-{n}" for n in range(1, 5)} | {"brier_lm": "BrierLM"}
SCORES = {"brier_lm": "BrierLM (percent)"}  # column → axis label
TWO_SCORES = SCORES | {"brier_1": "Brier-1 (percent)"}
RECONSTRUCTION = {"token_accuracy": "reconstruction accuracy (%)"}


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    label: str
    measures: tuple[Measure, ...]
    paper: dict[str, Any] = field(default_factory=dict)  # column → value reported in the paper
    series: str = ""  # the figure connects rows of the same series
    x: float | None = None  # position on the x axis


@dataclass(frozen=True)
class Figure:
    x: str = ""  # x axis label; if empty, each row gets its own tick
    panels: dict[str, str] = field(default_factory=lambda: SCORES)  # column → y axis label
    x_column: str | None = None  # column to plot on the x axis instead of Row.x
    log_x: bool = False
    annotate: bool = True  # label the points if x_column is set


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    source: str  # the table, figure or section of the paper
    finding: str  # the paper's result
    rows: Callable[[Scale, Lookup], list[Row]]  # called again after each round until no measures are pending
    columns: dict[str, str]
    figure: Figure
    claims: Callable[["Table"], list["Verdict"]]
    repeat: Callable[[Scale, int], Measure] | None = repeated  # base model by seed, to estimate variance across seeds
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES  # supported values of K
    cost_baseline: str = ""  # label of the row with relative cost 1
    note: str = ""
