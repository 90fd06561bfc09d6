"""FedGCR as plainly as possible: one client, one image, one cluster after the other.

It shares only the model's layers and the definition of the random numbers with the library.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.nn.functional as F

from equipoise.random import Purpose, fold
from tests.engine.plain_loop import PlainDropout, shuffled, with_plain_dropout

TRAINED = ("features.prompts", "features.gcnet", "head")


def moving(module):
    return {name: p for name, p in module.named_parameters() if name.startswith(TRAINED)}


def look(module, image):
    """h and z of one image."""
    tokens = module.stem.tokens(image.unsqueeze(0))
    h = module.features.gcnet(module.stem.encoder(tokens))
    prompts = torch.stack([p + h[0] for p in module.features.prompts])
    z = module.features.encoder(torch.cat([tokens, prompts.unsqueeze(0)], 1))
    return h[0], z[0]


def similar(a, b, cosine):
    return F.cosine_similarity(a, b, dim=0) if cosine else a @ b


def contrast(positive, others):
    """−log of the share of one exponential in a sum."""
    return -(positive.exp() / sum(other.exp() for other in others)).log()


@torch.no_grad()
def representation(module, x, y):
    """Eq. 4: the mean over classes of the means of h."""
    means = [
        torch.stack([look(module, image)[0] for image in x[y == label]]).mean(0)
        for label in y.unique()
    ]
    return torch.stack(means).mean(0)


def best_partition(points, number):
    """The clustering with the smallest sum of squares, by trying all; numbered by first points."""
    number = min(number, len(points))

    def spread(labels):
        groups = [
            [p for p, own in zip(points, labels, strict=True) if own == t] for t in range(number)
        ]
        if not all(groups):
            return math.inf
        return sum(float((torch.stack(g) - torch.stack(g).mean(0)).square().sum()) for g in groups)

    labels = min(itertools.product(range(number), repeat=len(points)), key=spread)
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]


def with_numbers_of_before(labels, points, last, number):
    """Number clusters like the nearest of the previous round, by trying all assignments."""
    means = [
        torch.stack([p for p, own in zip(points, labels, strict=True) if own == t]).mean(0)
        for t in range(max(labels) + 1)
    ]

    def cost(numbers):
        fresh = [t for t in numbers if t not in last]
        return len(fresh), sum(
            float((m - last[t]).square().sum())
            for m, t in zip(means, numbers, strict=True)
            if t in last
        )

    best = min(itertools.permutations(range(number), len(means)), key=cost)
    return [best[label] for label in labels]


def rounds_by_hand(
    module, federation, cohorts, *, seed, lr, batch, clusters, cosine, received, reweighted=True
):
    """Run one round per cohort; return the last model, and clusters, h̃ and weights by round."""
    module = with_plain_dropout(module)
    own_model, own_h, number, last, told = {}, {}, {}, {}, []
    for round_, cohort in enumerate(cohorts):
        members = {
            t: [own_h[c] for c in own_h if number[c] == t] for t in sorted(set(number.values()))
        }
        centres = {t: torch.stack(vectors).mean(0) for t, vectors in members.items()}
        trees, losses, fresh = [], [], {}
        for client in cohort:
            samples = torch.from_numpy(federation.train.of(client))
            x, y = federation.x[samples], federation.y[samples]
            module.eval()
            with torch.no_grad():
                losses.append(F.cross_entropy(module(x), y).item())
            trained = copy.deepcopy(module)
            optimizer = torch.optim.SGD(moving(trained).values(), lr=lr)
            key = fold(fold(seed, round_), client)
            order = shuffled(len(x), fold(key, Purpose.SHUFFLE, 0, 0))
            for step, start in enumerate(range(0, len(x), batch)):
                own = order[start : start + batch]
                trained.train()
                for layer in trained.modules():
                    if isinstance(layer, PlainDropout):
                        layer.key = fold(key, Purpose.STEP, 0, step)
                zs = trained.features(trained.stem(x[own]))
                total = F.cross_entropy(trained.head(zs), y[own])
                if client in number:
                    trained.eval()
                    for place, image in enumerate(own):
                        h, z = look(trained, x[image])[0], zs[place]
                        with torch.no_grad():
                            z0, z_prev = (
                                look(module, x[image])[1],
                                look(own_model[client], x[image])[1],
                            )
                        toward = {
                            t: similar(h, centre, cosine) / 0.5 for t, centre in centres.items()
                        }
                        apart = similar(h, own_h[client], cosine) / 0.5
                        group = contrast(toward[number[client]], [apart, *toward.values()])
                        near, far = similar(z, z0, cosine) / 0.5, similar(z, z_prev, cosine) / 0.5
                        total = total + (0.5 * group + 0.1 * contrast(near, [near, far])) / len(own)
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
            trained.eval()
            fresh[client] = (representation(module if received else trained, x, y), trained)
            trees.append({name: p.detach() for name, p in moving(trained).items()})
        for client, (h, trained) in fresh.items():
            own_h[client], own_model[client] = h, trained
        everyone = sorted(own_h)
        vectors = [own_h[client] for client in everyone]
        labels = with_numbers_of_before(best_partition(vectors, clusters), vectors, last, clusters)
        number |= {
            client: label
            for client, label in zip(everyone, labels, strict=True)
            if client in cohort
        }
        for t in set(number.values()):
            last[t] = torch.stack([own_h[c] for c in number if number[c] == t]).mean(0)
        sizes = [len(federation.train.of(client)) for client in cohort]
        raw = [float(size) for size in sizes]
        if reweighted:
            beta = 0.5 * (1 - 0.5**round_)
            for place, client in enumerate(cohort):
                alike = [
                    loss
                    for c, loss in zip(cohort, losses, strict=True)
                    if number[c] == number[client]
                ]
                mean = sum(alike) / len(alike)
                raw[place] *= (losses[place] ** (1 - beta) * mean**beta) ** 2
        weights = [value / sum(raw) for value in raw]
        mixed = {
            n: sum(w * tree[n] for w, tree in zip(weights, trees, strict=True)) for n in trees[0]
        }
        module.load_state_dict(mixed, strict=False)
        told.append(
            {
                "clusters": [number[c] for c in cohort],
                "h": torch.stack([fresh[c][0] for c in cohort]),
                "weights": weights,
            }
        )
    return mixed, told
