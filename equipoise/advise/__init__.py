"""Advice: measurements of a federation, the family of methods that fits, and a trial.

Examples
--------
>>> from equipoise import Training
>>> from equipoise.data import load
>>> partition = {"name": "dirichlet", "clients": 20, "beta": 0.1}
>>> advice = recommend(measure(load("digits", partition=partition), Training()))
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
