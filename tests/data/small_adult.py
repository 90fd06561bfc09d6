"""A small copy of Adult: artificial people in the layout of the UCI files."""

from __future__ import annotations

import numpy as np

EMPLOYERS = ("Private", "Local-gov", "Self-emp-inc")
OCCUPATIONS = ("Sales", "Exec-managerial", "Adm-clerical")
HEADER = "|1x3 Cross validator"


def rows(count, seed):
    """Return people of both sexes with every employer.

    Their income depends on education, hours, sex and employer.
    """
    draws = np.random.default_rng(seed)
    for _ in range(count):
        employer, occupation = draws.choice(EMPLOYERS, p=[0.5, 0.3, 0.2]), draws.choice(OCCUPATIONS)
        sex = draws.choice(["Female", "Male"], p=[0.4, 0.6])
        race = draws.choice(["White", "Black", "Other"], p=[0.6, 0.3, 0.1])
        education, hours, age = (
            int(draws.integers(5, 16)),
            int(draws.integers(20, 61)),
            int(draws.integers(18, 71)),
        )
        gain = int(draws.choice([0, 5000], p=[0.9, 0.1]))
        shown = employer if draws.random() > 0.02 else "?"
        marital = draws.choice(["Never-married", "Married-civ-spouse"])
        score = (
            0.4 * (education - 10)
            + 0.05 * (hours - 40)
            + 0.9 * (sex == "Male")
            + 0.6 * (employer == "Private")
        )
        rich = score + gain / 2500 + draws.normal() > 0.8
        yield [
            age,
            shown,
            int(draws.integers(20_000, 300_000)),
            "Bachelors",
            education,
            marital,
            occupation,
            "Not-in-family",
            race,
            sex,
            gain,
            0,
            hours,
            "United-States",
            ">50K" if rich else "<=50K",
        ]


def write_adult(folder, train=1200, test=600):
    """Write both files; return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed, end in (("adult.data", train, 0, ""), ("adult.test", test, 1, ".")):
        lines = [", ".join(map(str, row)) + end for row in rows(count, seed)]
        head = [HEADER] if end else []
        (folder / name).write_text("\n".join([*head, *lines, "", ""]))
    return folder
