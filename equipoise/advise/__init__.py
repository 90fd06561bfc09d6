"""Advice: what a federation is like, which family of methods fits, and a short comparison that checks it.

Examples
--------
>>> from equipoise import Training
>>> from equipoise.data import load
>>> measured = measure(load("digits", partition={"name": "dirichlet", "clients": 20, "beta": 0.1}), Training())
>>> advice = recommend(measured)
>>> FAMILIES[advice.family].title
'a personal model for each client'
"""

from __future__ import annotations

from equipoise.advise.families import FAMILIES, Advice, Family, recommend
from equipoise.advise.measure import Measured, measure
from equipoise.advise.trial import Trial, Verdict, plan_trial

__all__ = [
    "FAMILIES",
    "Advice",
    "Family",
    "Measured",
    "Trial",
    "Verdict",
    "measure",
    "plan_trial",
    "recommend",
]
