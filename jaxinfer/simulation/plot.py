"""A picture of one or more runs: the queue, the batch and the KV pool over simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from jaxinfer.errors import ConfigError
from jaxinfer.simulation.report import Report


def check_plot(path: Path) -> None:
    """Before the simulation, which may take minutes.

    Raises:
        ConfigError: where no picture can be drawn or written.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'jaxinfer[notebooks]'", option="--plot")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must be a .png, .svg or .pdf file, got {str(path)!r}", option="--plot")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--plot must be a file in a folder that exists, got {str(path)!r}", option="--plot")


def draw(reports: Sequence[Report], path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: when the file cannot be written.
    """
    # The object interface: pyplot would look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True)
    panels = {
        "waiting": "requests waiting",
        "running": "sequences running",
        "held": "KV pool held, %",
        "wasted": "of that without a token, %",
    }
    for axis, (column, title) in zip(axes.flat, panels.items(), strict=True):
        for report in reports:
            axis.plot(report.times, [_value(column, row, report.room_tokens) for row in report.rows], label=report.name, linewidth=1)
        axis.set_title(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("simulated seconds")
    if len(reports) > 1:
        axes[0][0].legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {str(path)!r} cannot be written: {error.strerror}", option="--plot") from error


def _value(column: str, row: dict[str, float], room_tokens: int) -> float:
    if column == "held":
        return 100 * row["held"] / room_tokens
    if column == "wasted":
        return 100 * row["wasted"] / max(1.0, row["held"])
    return row[column]
