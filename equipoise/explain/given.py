"""What the code does not say about keys: types and meanings in words."""

from __future__ import annotations

# Kind, default and meaning of the keys of the first level, if they are not in the code.
FIRST_LEVEL = {
    "imports": ("a file, a module or a list of them", "", ""),
    "method": (
        "a name, or a mapping with a name",
        "fedavg",
        "What is federated; `equipoise methods` lists the names.",
    ),
    "data": (
        "a name, or a mapping with a name",
        None,
        "The source of the data, and how they are divided.",
    ),
    "model": (
        "a name, or a mapping with a name",
        "",
        "By default that of the method, for most methods `mlp`.",
    ),
    "training": ("keys; see below", "{}", "How clients train."),
    "machine": ("keys; see below", "{}", "Device and precision."),
    "evaluation": (
        "keys; see below",
        "{}",
        "When clients are evaluated, and which round is reported.",
    ),
    "seed": ("a whole number", "0", ""),
    "checkpoint_every": ("a whole number", "1", ""),
    "start": ("a path, or keys; see below", "", ""),
}
STUDY = {
    "base": (
        "an experiment without method and seed",
        "The settings that all runs have in common.",
        "{data: digits}",
    ),
    "methods": (
        "a list",
        "Names, or mappings with a name and hyper-parameters. A mapping may also have label (the "
        "name of the method in tables), grid (lists of values to tune) and set (settings that are "
        "different for this method).",
        "[fedavg, {name: fedprox, mu: 0.1, grid: {mu: [0.01, 0.1, 1]}}]",
    ),
    "settings": (
        "labels with what they change",
        "Variants of the experiment. Every method runs in every setting.",
        "{even: {data.imbalance: 1}, uneven: {data.imbalance: 20}}",
    ),
    "seeds": ("a list of whole numbers", "The seeds of the runs; [0] by default.", "[0, 1, 2]"),
    "metrics": (
        "a list of names",
        "The columns of tables; docs/metrics.md lists them.",
        "[mean, worst10]",
    ),
    "split": ("'test' or 'val'", "The split on which tables are computed.", "val"),
    "baseline": (
        "the label of a method",
        "The method with which the others are compared, pair by pair.",
        "fedavg",
    ),
    "tuning": (
        "keys; see below",
        "How values are chosen with --tune.",
        "{by: sigma_clients, tolerance: 0.01}",
    ),
}
TUNING_SET = (
    "Settings that are different in the runs of tuning, such as fewer rounds, by their dotted "
    "keys. The comparison that follows does not use them."
)
KINDS = {
    "training.optimizer": "a name, or a mapping with a name; see below",
    "training.schedule": "a kind, or keys; see below",
    "training.augment": "a list of names, or of mappings with a name",
    "evaluation.metrics": "a list of names",
    "evaluation.fine_tune": "keys, see below, or null",
    "flower.privacy": "keys, see below, or null",
    "data.partition": "a name, or a mapping with a name; see below",
    "start.parts": "text or a list",
}
