"""An example of every key, as a line of YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

# Examples of keys whose default is no good example: the value, or the whole text if the key is used
# together with others. After @, what the key belongs to.
EXAMPLES: dict[str, Any] = {
    "imports": "equipoise",
    "method": "{name: fedprox, mu: 0.1}",
    "model": "{name: mlp, hidden: [64]}",
    "model.source@pretrained": "google/vit-base-patch16-224",
    "method.meta@grace": "method: {name: grace, meta: false, restore: false}",
    "start": "{path: runs/first, parts: features}",
    "start.path": "runs/first",
    "start.parts": "start: {path: runs/first, parts: features}",
    "training": "{rounds: 100, optimizer: {name: sgd, lr: 0.1}}",
    "machine": "{device: cpu}",
    "evaluation": "{every: 5, select: best}",
    "flower": "{clients: 4}",
    "data": "{name: digits, imbalance: 5}",
    "seed": 3,
    "tracking": "{name: tensorboard}",
    "checkpoint_every": 10,
    "training.rounds": 100,
    "training.batch_size": 32,
    "training.optimizer": "{name: sgd, lr: 0.1, momentum: 0.9}",
    "training.optimizer.momentum": 0.9,
    "training.optimizer.dampening": (
        "training: {optimizer: {name: sgd, momentum: 0.9, dampening: 0.1}}"
    ),
    "training.optimizer.weight_decay": 0.0001,
    "training.schedule": "{kind: cosine, warmup: 5}",
    "training.epochs": [2, 5],
    "training.steps": 20,
    "training.cohort": 0.1,
    "training.clip": 1.0,
    "training.augment": "[flip, {name: crop, padding: 2}]",
    "training.report_samples": 500,
    "training.stragglers": 0.3,
    "training.loss": "{name: focal, gamma: 2.0}",
    "training.optimizer.nesterov": (
        "training: {optimizer: {name: sgd, momentum: 0.9, nesterov: true}}"
    ),
    "training.schedule.kind": "cosine",
    "training.schedule.decay": "training: {schedule: {kind: exponential, decay: 0.99}}",
    "training.schedule.at": (
        "training: {schedule: {kind: steps, at: [50, 75], factors: [0.2, 0.02]}}"
    ),
    "training.schedule.factors": (
        "training: {schedule: {kind: steps, at: [50, 75], factors: [0.2, 0.02]}}"
    ),
    "training.schedule.floor": "training: {schedule: {kind: cosine, floor: 0.01}}",
    "training.schedule.warmup": 5,
    "training.schedule.over": "training: {schedule: {kind: cosine, over: 100}}",
    "evaluation.select": "best",
    "evaluation.select_by": "evaluation: {select: best, select_by: accuracy}",
    "evaluation.select_on": "evaluation: {select: best, select_on: server}",
    "evaluation.patience": 10,
    "evaluation.last": 8,
    "evaluation.positive": 1,
    "evaluation.metrics": "[auroc, ece]",
    "evaluation.fine_tune": "{epochs: 1, move: head}",
    "evaluation.fine_tune.steps": 5,
    "evaluation.fine_tune.lr": 0.01,
    "machine.device": "cpu",
    "machine.precision": "float64",
    "machine.chunk": 8,
    "machine.frozen": "bfloat16",
    "machine.processes": 2,
    "data.partition": "{name: dirichlet, clients: 20, beta: 0.3}",
    "data.unseen": 3,
    "data.leave_out": "rotated",
    "data.test": "group",
    "data.server_val": 0.1,
    "data.encode": "data: {name: cifar, encode: google/vit-base-patch16-224}",
    "data.encode_size": (
        "data: {name: cifar, encode: google/vit-base-patch16-224, encode_size: 224}"
    ),
    "data.seed": 1,
    "data.root": "data",
    "data.classes@silos": 10,
    "data.classes@arrays": 10,
    "data.x@arrays": "x.npy",
    "data.y@arrays": "y.npy",
    "data.groups@arrays": "groups.npy",
    "data.attributes@arrays": "{sex: sex.npy}",
    "data.clients@arrays": "hospital.npy",
    "data.clients@adult": "[sex, occupation]",
    "data.file": "patients.csv",
    "data.x@table": "[age, pressure]",
    "data.y@table": "diagnosis",
    "data.clients@table": "hospital",
    "data.groups@table": "region",
    "data.attributes@table": "[sex]",
    "data.ignore": "[patient, admitted]",
    "data.columns": "runs/fedavg",
    "data.delimiter": "tab",
    "data.classes@cifar": 100,
    "data.classes@imagefolder": "[dog, elephant]",
    "data.clients": 50,
    "data.sites@prostate": "[BIDMC, HK]",
    "data.dif": 2.0,
    "data.domains@digitfive": "[mnist, usps]",
    "data.domains@imagefolder": "[photo, sketch]",
    "data.characters": "abcdefghij",
    "data.partition.clients": 20,
    "data.partition.beta": 0.3,
    "data.partition.classes": 2,
    "data.partition.imbalance": 4.0,
    "data.partition.clients_per_group": "[4, 2, 1, 1, 1]",
    "data.partition.ratio": 1.5,
    "data.partition.largest": 100,
    "data.transposed": True,
    "data.mapped": True,
    "evaluation.every": 5,
    "tuning.seed": 7,
    "tuning.by": "worst_group",
    "flower.clients": 4,
    "flower.max_client": 20,
    "flower.max_share": 0.5,
    "flower.roster": "roster.yaml",
    "data.partition.within": "imbalance",
    "data.partition.order": "[plain, rotated]",
    "flower.privacy": "{clip: 1.0, epsilon: 8.0}",
    "flower.privacy.clip": 1.0,
    "flower.privacy.epsilon": 8.0,
    "flower.privacy.sensitivity": 1.0,
    "tuning.set": "tuning: {set: {training.rounds: 10}}",
}


def given_example(key: str, of: str) -> Any:
    """Return the example of a key, which may depend on what it belongs to; None without one."""
    return EXAMPLES.get(f"{key}@{of}", EXAMPLES.get(key))


def example_of(
    key: str,
    value: Any,
    default: str | None,
    inner: dict[str, Any],
    *,
    listed: bool,
    around: Mapping[str, Any] | None,
) -> str:
    """Return a line of YAML that sets a key; empty without an example and a default."""
    if isinstance(value, str) and value.startswith(f"{key.partition('.')[0]}:"):
        return value
    if value is None:
        value = yaml.safe_load(default) if default is not None else None
        if value in (None, [], {}, ""):
            return ""
        value = not value if isinstance(value, bool) else value
    *way, last, name = key.split(".")
    options: Any = {**inner, name: parsed(value)}
    nested: Any = {last: [options] if listed else options}
    for step in reversed(way):
        nested = {step: {**((around or {}).get(step, {})), **nested}}
    return one_line(nested)[1:-1]


def parsed(example: Any) -> Any:
    """Parse an example that is written in YAML."""
    return yaml.safe_load(example) if isinstance(example, str) else example


def one_line(value: Any) -> str:
    """Return a value as YAML in one line."""
    text = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    )
    return str(text).removesuffix("...\n").strip()
