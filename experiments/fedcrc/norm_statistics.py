"""FedCRC, table I: the accuracy of global models if BatchNorm uses statistics of the test data.

``python experiments/fedcrc/norm_statistics.py runs/table1-cifar10`` evaluates every global model
twice on its clients' test data: with its running statistics, as Equipoise reports it, and with the
mean and variance of each client's own test images, as for models without running statistics
(``model.running: false``). Training is the same for both, except for methods that train a head on
features that are not trained.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from equipoise import Federation, load
from equipoise.data import load as load_data
from equipoise.run.directory import read_config

Scores = dict[tuple[str, str], list[tuple[float, float]]]


@torch.no_grad()
def accuracy(model: nn.Module, federation: Federation) -> float:
    """Return the mean accuracy over clients, with all test data of a client in one batch."""
    held = [torch.from_numpy(federation.test.of(client)) for client in federation.seen]
    hits = [
        (model(federation.x[samples]).argmax(1) == federation.y[samples]).double().mean()
        for samples in held
    ]
    return float(torch.stack(hits).mean())


def forget_statistics(model: nn.Module) -> nn.Module:
    """Make every BatchNorm layer use the statistics of its batch."""
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return model


def read(runs: Path) -> Scores:
    """Return the accuracies of a study by setting and method, one pair per seed.

    A pair has the accuracy with running statistics and that with those of the batch.
    """
    found: Scores = defaultdict(list)
    for path in sorted(runs.glob("*/*/seed*/model.safetensors")):
        federation = load_data(**read_config(path.parent)["data"])
        model = load(path.parent)
        scores = accuracy(model, federation), accuracy(forget_statistics(model), federation)
        found[path.parts[-4], path.parts[-3]].append(scores)
    return found


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="the directory of the study")
    arguments = parser.parse_args()
    scores = read(arguments.runs)
    if not scores:
        parser.error(f"{arguments.runs} holds no runs of a study")
    print(
        "setting, method: running statistics, the batch's own (seeds, over which these are means)"
    )
    for (setting, method), of_seeds in scores.items():
        running, own = 100 * np.mean(of_seeds, axis=0)
        print(f"{setting}, {method}: {running:.2f}, {own:.2f} ({len(of_seeds)})", flush=True)


if __name__ == "__main__":
    main()
