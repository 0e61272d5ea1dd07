"""The figure of an experiment, in one style for all: a panel a measure, 95% intervals, a colour a series."""

import io
from typing import Any

from calm.paper.values import Line, Table

STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.titlesize": 12,
    "legend.frameon": False,
    "lines.markersize": 5,
    "savefig.dpi": 150,
}
COLOURS = ("#1f5fa8", "#e07b00", "#2a8c4a", "#b03a8c", "#6b6b6b", "#00a0a8")
MARKERS = "os^Dvp"
PLAIN = 0.1, 1e4  # numbers that need no powers of ten


def draw(table: Table) -> bytes:
    """A PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = table.experiment.figure
    with pyplot.rc_context(STYLE):
        size = (6.4 * len(figure.panels), 4.4)
        page, axes = pyplot.subplots(1, len(figure.panels), figsize=size, layout="constrained", squeeze=False)
        for axis, (column, label) in zip(axes[0], figure.panels.items(), strict=True):
            if figure.x:
                _curves(axis, table, column)
            else:
                _side_by_side(axis, table, column)
            axis.set_ylabel(label)
            if column.startswith("brier") and axis.get_ylim()[0] > 0:
                axis.set_ylim(bottom=0)  # so that small differences look small
        page.suptitle(table.experiment.title)
        content = io.BytesIO()
        page.savefig(content, format="png")
        pyplot.close(page)
    return content.getvalue()


def _curves(axis: Any, table: Table, column: str) -> None:
    figure = table.experiment.figure
    every = [line for line in table.lines.values() if line.row.series and _place(line, figure.over) is not None]
    for number, series in enumerate(dict.fromkeys(line.row.series for line in every)):
        mine = [line for line in every if line.row.series == series and _known(line, column)]
        if not mine:
            continue
        places = [_place(line, figure.over) for line in mine]
        style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
        joined = "-" if len(mine) > 1 else ""
        axis.errorbar(places, *_values(mine, column), linestyle=joined, capsize=3, label=series, **style)
        if figure.over is not None and figure.named:
            for line, place in zip(mine, places, strict=True):
                text = f"{line.row.x:g}" if line.row.x is not None else line.row.label.removeprefix(f"{series}, ")
                at = place, line.values[column].value
                below = number % 2 == 0  # curves that meet have their names on two sides
                side: Any = {"xytext": (5, -12), "ha": "left"} if below else {"xytext": (-5, 5), "ha": "right"}
                axis.annotate(text, at, textcoords="offset points", fontsize=8, color=style["color"], **side)
    axis.set_xlabel(figure.x)
    if figure.log_x:
        _log_scale(axis)
    shown = len(axis.get_legend_handles_labels()[1])
    if shown > 1:
        axis.legend()
    elif not shown:
        _nothing(axis)


def _log_scale(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if low > PLAIN[0] and high < PLAIN[1]:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())


def _side_by_side(axis: Any, table: Table, column: str) -> None:
    lines = list(table.lines.values())
    known = [place for place, line in enumerate(lines) if _known(line, column)]
    if not known:
        _nothing(axis)
    axis.errorbar(known, *_values([lines[place] for place in known], column), fmt="o", capsize=4, color=COLOURS[0])
    axis.set_xticks(range(len(lines)), [line.row.label for line in lines], rotation=25, ha="right")
    axis.set_xlim(-0.5, len(lines) - 0.5)  # a row without this score keeps its place


def _nothing(axis: Any) -> None:
    axis.text(0.5, 0.5, "no model has this score: a part of it is not above 0", ha="center", transform=axis.transAxes)


def _known(line: Line, column: str) -> bool:
    return column in line.values and line.values[column].value is not None


def _place(line: Line, over: str | None) -> float | None:
    return line.row.x if over is None else line.values[over].value if over in line.values else None


def _values(lines: list[Line], column: str) -> tuple[list[float], list[list[float]]]:
    """Heights, and how far the intervals reach down and up.

    A BrierLM with an upper end alone may be none: it reaches down to 0. Of what has no interval nothing is drawn.
    """
    values = [line.values[column] for line in lines]
    heights = [float(v.value or 0) for v in values]
    highs = [h if v.high is None else v.high for v, h in zip(values, heights, strict=True)]
    lows = [(h if v.high is None else 0.0) if v.low is None else v.low for v, h in zip(values, heights, strict=True)]
    down, up = ([max(0.0, a - b) for a, b in zip(*pair, strict=True)] for pair in ((heights, lows), (highs, heights)))
    return heights, [down, up]
