"""Figures and tables made from run directories.

Each figure has a function that computes its data and one that draws them, so that the numbers can
be used without the picture. Drawing needs matplotlib (``pip install 'equipoise[report]'``).

Examples
--------
>>> import tempfile
>>> from pathlib import Path
>>> from equipoise import train
>>> from equipoise.data import load
>>> out = Path(tempfile.mkdtemp())
>>> _ = train(load("digits"), method="faa", rounds=2, out=out / "run")
>>> changes = gap_changes(out / "run")
>>> len(changes), len(changes[0].weight)
(22, 2)
>>> draw_gap_changes({"digits": changes[:5]}, out / "figure2.png").name
'figure2.png'
"""

from equipoise.figures.cost import Cost, cost, cost_table
from equipoise.figures.embedding import Embedding, draw_embeddings, embed_features
from equipoise.figures.gaps import GapChanges, draw_gap_changes, gap_changes, sweep_gaps
from equipoise.figures.surface import Surface, draw_surfaces, loss_surface

__all__ = [
    "Cost",
    "Embedding",
    "GapChanges",
    "Surface",
    "cost",
    "cost_table",
    "draw_embeddings",
    "draw_gap_changes",
    "draw_surfaces",
    "embed_features",
    "gap_changes",
    "loss_surface",
    "sweep_gaps",
]
