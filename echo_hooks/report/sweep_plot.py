"""Measured against predicted times of collectives, as one self-contained page with logarithmic axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from echo_hooks.graph.files import atomic_write
from echo_hooks.network.measured import Compared

_COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#ff9900", "#0099c6", "#dd4477", "#66aa00")


def write_sweep_plot(compared: Sequence[Compared], title: str, path: Path) -> None:
    """Marks are measured, lines predicted; a colour per sweep."""
    figure = go.Figure()
    sweeps = list({id(c.sweep): c.sweep for c in compared}.values())
    for i, sweep in enumerate(sweeps):
        points = [c for c in compared if c.sweep is sweep]
        name = f"{sweep.label} ({sweep.source})".replace("<", "&lt;")  # plotly reads names as markup
        shared = {"x": [c.bytes for c in points], "legendgroup": str(i), "marker": {"color": _COLOURS[i % 8]}}
        figure.add_scatter(y=[c.measured_us for c in points], mode="markers", name=f"{name}, measured", **shared)
        figure.add_scatter(y=[c.predicted_us for c in points], mode="lines", name="predicted", **shared)
    figure.update_layout(
        title=f"Collectives on {title}".replace("<", "&lt;"),
        xaxis_title="bytes",
        yaxis_title="us",
        template="plotly_white",
    )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    atomic_write(path, figure.to_html(include_plotlyjs=True, full_html=True).encode())
