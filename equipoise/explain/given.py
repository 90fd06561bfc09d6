"""What the code does not say about keys: types and meanings in words."""

from __future__ import annotations

from equipoise.study.reading import COLUMNS

# Kind, default and meaning of the keys of the first level, if they are not in the code.
FIRST_LEVEL = {
    "imports": ("a file, a module or a list of them", "", ""),
    "method": (
        "a name, or a mapping with a name",
        "fedavg",
        "What is federated; `equipoise methods` lists the names, and `equipoise explain ditto` "
        "explains the options of the method `ditto`.",
    ),
    "data": (
        "a name, or a mapping with a name",
        None,
        "The source of the data, and how they are divided.",
    ),
    "model": (
        "a name, or a mapping with a name",
        "",
        "By default that of the method, for most methods `mlp`. docs/models.md lists the names, "
        "and `equipoise explain cnn2` explains the options of the model `cnn2`.",
    ),
    "training": ("keys; see below", "{}", "How clients train."),
    "machine": ("keys; see below", "{}", "Device and precision."),
    "evaluation": (
        "keys; see below",
        "{}",
        "When clients are evaluated, and which round is reported.",
    ),
    "seed": ("a whole number", "0", ""),
    "checkpoint_every": ("a whole number or null", "null", ""),
    "start": ("a path, or keys; see below", "", ""),
    "tracking": ("a name, a mapping with a name, or a list of them", "[]", ""),
}
# Keys that every method takes beside its own options: kind, meaning and example.
METHOD = {
    "weights": (
        "one of 'size', 'uniform'",
        "The clients' weights before the aggregation changes them; by default those of the paper.",
        "{name: fedavg, weights: uniform}",
    ),
    "sampling": (
        "a name, or a mapping with a name",
        "The sampler, which chooses the clients of a round; `uniform` by default.",
        "{name: fedavg, sampling: size}",
    ),
    "local": (
        "a name, or a mapping with a name",
        "The local rule of another method, instead of the method's own.",
        "{name: qffl, local: {name: fedprox, mu: 0.1}}",
    ),
    "aggregation": (
        "a name, or a mapping with a name",
        "The aggregation of another method, instead of the method's own.",
        "{name: fedrep, aggregation: {name: qffl, q: 1}}",
    ),
    "view": (
        "a name, or a mapping with a name",
        "The view of the federation on which the method runs, instead of the method's own.",
        "{name: fedavg, view: everyone}",
    ),
    "guard": (
        "a name, or a mapping with a name",
        "What checks updates before they are combined; nothing by default.",
        "{name: fedavg, guard: norm}",
    ),
}
# Kind, default, meaning and example of the keys of a study. The default is None if a value is
# required.
STUDY = {
    "base": (
        "an experiment without method and seed",
        None,
        "The settings that all runs have in common.",
        "{data: digits}",
    ),
    "methods": (
        "a list",
        None,
        "Names, or mappings with a name, hyper-parameters and perhaps `label`, `grid` and `set`.",
        "[fedavg, {name: fedprox, mu: 0.1, grid: {mu: [0.01, 0.1, 1]}}]",
    ),
    "settings": (
        "labels with what they change",
        "",
        "Variants of the experiment. Every method runs in every setting.",
        "{even: {data.imbalance: 1}, uneven: {data.imbalance: 20}}",
    ),
    "seeds": ("a list of whole numbers", "[0]", "The seeds of the runs.", "[0, 1, 2]"),
    "metrics": (
        "a list of names",
        f"[{', '.join(COLUMNS)}]",
        "The columns of tables; docs/metrics.md lists them. By default also mean and worst group "
        "of each of `evaluation.metrics`, and no metrics of groups if all clients are in one "
        "group.",
        "[mean, worst10]",
    ),
    "split": ("'test' or 'val'", "test", "The split on which tables are computed.", "val"),
    "baseline": (
        "the label of a method",
        "",
        "The method with which the others are compared, pair by pair. If groups are left out in "
        "turn, it is the first method by default. `equipoise compare --baseline` replaces it.",
        "fedavg",
    ),
    "tuning": (
        "keys; see below",
        "{}",
        "How values are chosen with --tune.",
        "{by: sigma_clients, tolerance: 0.01}",
    ),
}
# The same of the keys of a method in a study, beside its name and its options.
METHOD_OF_STUDY = {
    "label": (
        "text",
        "",
        "The name of the method in tables; by default its name. Methods need different labels.",
        "[{name: fedprox, mu: 1, label: strong}]",
    ),
    "grid": (
        "keys with lists of values",
        "{}",
        "The values that `equipoise compare --tune` tries, in all combinations: of options of the "
        "method, such as `mu` or `aggregation.t`, or of dotted keys, such as "
        "`training.optimizer.lr`. Then `equipoise compare` runs the values that were chosen.",
        "[{name: fedprox, grid: {mu: [0.01, 0.1], training.optimizer.lr: [0.05, 0.1]}}]",
    ),
    "set": (
        "keys with values",
        "{}",
        "Settings that are different for this method, by their dotted keys.",
        "[{name: local, set: {training.epochs: 5}}]",
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
    "training.loss": "a name, a mapping with a name, or null",
    "evaluation.metrics": "a list of names",
    "evaluation.fine_tune": "keys, see below, or null",
    "flower.privacy": "keys, see below, or null",
    "data.partition": "a name, or a mapping with a name; see below",
    "start.parts": "text or a list",
    "method.host": "a name, or a mapping with a name",
}
