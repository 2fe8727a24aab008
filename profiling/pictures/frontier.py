"""The frontier of a search: seconds to the first token against correct answers that are lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from artifacts import HeadwiseError
from artifacts.errors import one_line
from artifacts.schema.search import FrontierPoint
from profiling.pictures.drawing import LINES, MARK, new_figure
from profiling.pictures.registry import Drawing, Source, picture

_FIELDS = ("spent", "seconds", "lost", "lost_high", "perplexity")


@picture(of="artifact")
def frontier(source: Source) -> Iterator[Drawing]:
    """Budgets of the search: time to the first token against the fraction of answers lost."""
    artifact = source.artifact
    assert artifact is not None
    search = artifact.search
    points = search.frontier if search is not None else ()
    if search is None or not points:
        raise HeadwiseError(
            "the artifact has no frontier of budgets: headwise search measures one, --picture "
            "patterns draws its patterns"
        )
    shown = [point for point in points if point.lost is not None]
    device = search.device
    if search.cost is not None:
        device = search.cost.device
    tokens = f"{search.calibration.length:,} tokens"
    caption = (
        f"{one_line(artifact.model.name)}, {tokens}, on {one_line(device)}. Bars end at the "
        "upper bound at 95% confidence. Predicted points are scaled from the measured one."
    )
    # The name is no formula.
    caption = caption.replace("$", r"\$")
    yield Drawing(
        name="frontier",
        figure=frontier_figure(shown or list(points), search.spent, caption),
        header=[*_FIELDS, "measured", "written"],
        rows=(
            [
                *(getattr(point, name) for name in _FIELDS),
                point.measured,
                _is_written(point, search.spent),
            ]
            for point in points
        ),
    )


def frontier_figure(points: Sequence[FrontierPoint], spent: float, caption: str) -> Any:
    """Draw the frontier.

    Args:
        points: of budgets, the cheapest first.
        spent: the budget in the artifact.
        caption: printed below the figure.
    """
    figure = new_figure(5.5, 3.6, caption)
    panel = figure.subplots()
    timed = all(point.seconds is not None for point in points)
    asked = all(point.lost is not None for point in points)

    def place(point: FrontierPoint) -> tuple[float, float]:
        x = point.seconds if timed else point.spent
        y = point.lost if asked else point.perplexity
        return float(x or 0.0), 100 * float(y or 0.0)

    predicted = [point for point in points if not point.measured]
    if predicted:
        panel.plot(
            *zip(*map(place, predicted), strict=True),
            "o--",
            color=LINES[0],
            markerfacecolor="white",
            linewidth=1,
            label="predicted",
        )
    measured = [point for point in points if point.measured]
    for at, point in enumerate(measured):
        x, y = place(point)
        is_written = _is_written(point, spent)
        label = None
        if at == 0:
            label = "measured"
        if is_written:
            label = "measured, in the artifact"
        panel.plot(
            [x],
            [y],
            "*" if is_written else "s",
            markersize=11 if is_written else 6,
            color=MARK if is_written else LINES[2],
            label=label,
            zorder=3,
        )
        if asked and point.lost_high is not None:
            panel.plot([x, x], [y, 100 * point.lost_high], color=MARK, linewidth=1, zorder=2)
    panel.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    panel.set_xlabel(
        "seconds to the first token" if timed else "fraction of dense attention's cost"
    )
    panel.set_ylabel("correct answers lost, %" if asked else "rise of perplexity, %")
    panel.legend(fontsize=7, frameon=False)
    return figure


def _is_written(point: FrontierPoint, spent: float) -> bool:
    return point.measured and abs(point.spent - spent) < 1e-4
