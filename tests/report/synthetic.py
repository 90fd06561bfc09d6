"""Run directories of any size, written through the journals of runs instead of by training."""

from __future__ import annotations

import json

import numpy as np
import yaml

from equipoise.run.files import Journal, write_atomically
from equipoise.run.records import summarize_rows
from equipoise.tasks import build


def write_run(
    directory,
    *,
    clients=12,
    rounds=6,
    groups=3,
    cohort=None,
    seed=0,
    method="fedavg",
    notes=None,
    unseen=0,
    every=1,
    finish=True,
):
    """Write a run whose clients' scores increase over rounds, and return its directory.

    ``notes`` maps the names of notes to functions of (round, ids of the cohort). Unseen clients are
    the last ones.
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    journals = {
        name: Journal(directory / f"{name}.jsonl") for name in ("metrics", "rounds", "timings")
    }
    group = np.arange(clients) % groups
    plateau = np.clip(0.9 - 0.5 * group / groups + rng.normal(scale=0.05, size=clients), 0, 1)
    trained = np.arange(clients - unseen)
    rows = []
    for number in range(1, rounds + 1):
        score = plateau * (1 - np.exp(-3 * number / rounds))
        if number % every == 0:
            rows = _rows(number, score, group, unseen)
            journals["metrics"].append(rows)
        ids = np.sort(rng.choice(trained, cohort, replace=False)) if cohort else trained
        row = {
            "round": number,
            "cohort": len(ids),
            "train_loss": float(1 - score.mean()),
            "messages": len(ids),
        }
        row |= {"evaluations": 0, "bytes_up": 1000 * len(ids), "bytes_down": 2000 * len(ids)}
        if cohort or notes:
            row["clients"] = ids.tolist()
        if notes:
            row["notes"] = {name: list(note(number, ids)) for name, note in notes.items()}
        journals["rounds"].append([row])
        journals["timings"].append(
            [{"round": number, "train": 0.25, "combine": 0.125, "evaluate": 0.0625}]
        )
    config = {
        "method": {"name": method},
        "data": {"name": "digits", "seed": seed},
        "training": {"rounds": rounds},
        "seed": seed,
        "resolved": {
            "equipoise": "0.1.0",
            "torch": "2.6.0",
            "device": "cpu",
            "threads": 1,
            "clients": clients,
        },
    }
    write_atomically(directory / "config.yaml", yaml.safe_dump(config).encode())
    if finish:
        task = build("classification")
        moved = sum(row["bytes_up"] for row in journals["rounds"])
        summary = {
            "method": method,
            "data": "digits",
            "seed": seed,
            "rounds": rounds,
            "round": rounds,
            "select": "last",
            "task": "classification",
            "score": "accuracy",
            "results": summarize_rows(rows, task),
            "validation": summarize_rows(rows, task, split="val"),
            "bytes_up": moved,
            "bytes_down": 2 * moved,
        }
        write_atomically(directory / "summary.json", json.dumps(summary).encode())
    return directory


def _rows(number, score, group, unseen):
    return [
        {
            "round": number,
            "model": "global",
            "split": split,
            "client": client,
            "group": f"group {group[client]}",
            "unseen": bool(client >= len(score) - unseen),
            "n": 10 + client % 7,
            "loss": float(1 - score[client]),
            "accuracy": float(score[client]),
        }
        for split in ("val", "test")
        for client in range(len(score))
    ]
