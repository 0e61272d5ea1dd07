"""What an experiment is: the rows of a table, the measures that each takes, what the paper prints, a figure, and what
the paper concludes, said so that numbers can answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calm.paper.measures import Measure, repeated
from calm.paper.scales import CHUNK_SIZES, Scale

if TYPE_CHECKING:
    from calm.paper.values import Table, Verdict

Known = Callable[[Measure], dict[str, Any] | None]  # what was measured so far

BRIERS = {f"brier_{n}": f"Brier-{n}" for n in range(1, 5)} | {"brier_lm": "BrierLM"}
SCORES = {"brier_lm": "BrierLM (percent)"}  # labels of axes
TWO_SCORES = SCORES | {"brier_1": "Brier-1 (percent)"}
RECONSTRUCTION = {"token_accuracy": "tokens reconstructed (%)"}


@dataclass(frozen=True)
class Row:
    label: str
    measures: tuple[Measure, ...]
    paper: dict[str, Any] = field(default_factory=dict)  # column → what the paper prints
    series: str = ""  # rows of one series are joined in the figure
    x: float | None = None  # its place there


@dataclass(frozen=True)
class Figure:
    x: str = ""  # the axis' label; without one rows stand side by side
    panels: dict[str, str] = field(default_factory=lambda: SCORES)  # column → label
    over: str | None = None  # the column that is the place on the x axis, where it is none of a row's own
    log_x: bool = False
    named: bool = True  # points say which they are, where the x axis does not


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    place: str  # in the paper
    finding: str  # of the paper
    rows: Callable[[Scale, Known], list[Row]]  # asked again when more is known, until it wants nothing new
    columns: dict[str, str]
    figure: Figure
    claims: Callable[["Table"], list["Verdict"]]
    repeat: Callable[[Scale, int], Measure] | None = repeated  # by seed: whose spread is that of what is compared
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES  # for which it can be made
    reference: str = ""  # the row whose training step costs 1
    note: str = ""
