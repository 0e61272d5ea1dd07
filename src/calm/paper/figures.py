"""Figures of the experiments: one panel per column, one color per series, error bars for 95% intervals."""

import io
from typing import Any

from calm.paper.experiment import Line, Table

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
COLORS = ("#1f5fa8", "#e07b00", "#2a8c4a", "#b03a8c", "#6b6b6b", "#00a0a8")
MARKERS = "os^Dvp"
DECIMAL_RANGE = 0.1, 1e4  # axis limits within which tick labels are decimal numbers


def draw(table: Table) -> bytes:
    """Draw the figure of a table as a PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = table.experiment.figure
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(6.4 * len(figure.panels), 4.4), layout="constrained")
        axes = page.subplots(1, len(figure.panels), squeeze=False)[0]
        for axis, (column, label) in zip(axes, figure.panels.items(), strict=True):
            if figure.x:
                _curves(axis, table, column)
            else:
                _categories(axis, table, column)
            axis.set_ylabel(label)
            if column.startswith("brier") and axis.get_ylim()[0] > 0:
                axis.set_ylim(bottom=0)  # a truncated axis would exaggerate small differences
        page.suptitle(table.experiment.title)
        return png(page)


def png(figure: Any, dpi: int | None = None) -> bytes:
    """Render a matplotlib figure as a PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()


def _curves(axis: Any, table: Table, column: str) -> None:
    figure = table.experiment.figure

    def x(line: Line) -> float | None:
        return line.row.x if figure.x_column is None else line.value(figure.x_column)

    lines = [line for line in table.lines.values() if line.row.series and x(line) is not None]
    for number, series in enumerate(dict.fromkeys(line.row.series for line in lines)):
        points = [line for line in lines if line.row.series == series and line.value(column) is not None]
        if not points:
            continue
        style = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
        linestyle = "-" if len(points) > 1 else ""
        xs, (ys, errors) = [x(line) for line in points], _values(points, column)
        axis.errorbar(xs, ys, errors, linestyle=linestyle, capsize=3, label=series, **style)
        if figure.x_column is not None and figure.annotate:
            for line in points:
                text = f"{line.row.x:g}" if line.row.x is not None else line.row.label.removeprefix(f"{series}, ")
                xy = x(line), line.value(column)
                below = number % 2 == 0  # alternate sides, so that labels of adjacent curves do not overlap
                offset: Any = {"xytext": (5, -12), "ha": "left"} if below else {"xytext": (-5, 5), "ha": "right"}
                axis.annotate(text, xy, textcoords="offset points", fontsize=8, color=style["color"], **offset)
    axis.set_xlabel(figure.x)
    if figure.log_x:
        _log_scale(axis)
    num_series = len(axis.get_legend_handles_labels()[1])
    if num_series > 1:
        axis.legend()
    elif not num_series:
        _no_values(axis)


def _log_scale(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    if low > DECIMAL_RANGE[0] and high < DECIMAL_RANGE[1]:
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())


def _categories(axis: Any, table: Table, column: str) -> None:
    lines = list(table.lines.values())
    ticks = [tick for tick, line in enumerate(lines) if line.value(column) is not None]
    if not ticks:
        _no_values(axis)
    axis.errorbar(ticks, *_values([lines[tick] for tick in ticks], column), fmt="o", capsize=4, color=COLORS[0])
    axis.set_xticks(range(len(lines)), [line.row.label for line in lines], rotation=25, ha="right")
    axis.set_xlim(-0.5, len(lines) - 0.5)  # rows without a value keep their tick


def _no_values(axis: Any) -> None:
    text = "undefined for all models: at least one Brier-n is not positive"
    axis.text(0.5, 0.5, text, ha="center", transform=axis.transAxes)


def _values(lines: list[Line], column: str) -> tuple[list[float], list[list[float]]]:
    """Values, and the lengths of their error bars below and above.

    A BrierLM without a lower bound may be undefined: its error bar extends to 0. Values without an interval get an
    error bar of length 0.
    """
    values, below, above = [], [], []
    for line in lines:
        low, value, high = line.values[column].bounds
        if line.values[column].low is None and line.values[column].high is not None:
            low = 0.0
        values.append(value)
        below.append(max(0.0, value - low))
        above.append(max(0.0, high - value))
    return values, [below, above]
