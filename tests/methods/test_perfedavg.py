"""Per-FedAvg: meta steps against plain PyTorch, the Hessian against an exact one, and limits."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equipoise.engine.settings import Machine, Training
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.methods import build
from equipoise.methods.perfedavg import MetaGradient
from equipoise.optimizers import Schedule, Sgd
from equipoise.random import Purpose, fold
from equipoise.run.evaluation import Evaluation
from equipoise.run.trainer import Trainer
from tests.engine.by_hand import average, hand_batches, held_by, tensors
from tests.engine.comparison import distance
from tests.engine.federations import images
from tests.engine.five_clients import BATCH, CHUNKS, COHORTS, EVERYONE, SEED, SIZES
from tests.engine.small_models import NOISE, mlp, normalised
from tests.methods.decoupled import personal_models, played
from tests.methods.skewed import scores
from tests.rounds import linear, play, random_regression, scalar, targets, weight


def gradient_at(module, values, x, y):
    """The gradient of the mean loss at other parameters; the module is not changed."""
    params = list(module.parameters())
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)
    gradient = torch.autograd.grad(F.cross_entropy(module(x), y), params)
    with torch.no_grad():
        for p, value in zip(params, before, strict=True):
            p.copy_(value)
    return gradient


def meta_rounds(module, cohorts, *, alpha, delta=None, epochs=1):
    """Algorithm 1 of Fallah et al. in plain PyTorch, weighted by size."""
    federation = images(sizes=SIZES)
    batches = 2 if delta is None else 3
    for round_, cohort in enumerate(cohorts):
        sent = []
        for client in cohort:
            own = copy.deepcopy(module).train()
            norms = [layer for layer in own.modules() if isinstance(layer, nn.BatchNorm2d)]
            optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
            x, y = held_by(federation, client)
            stream = hand_batches(len(x), fold(fold(SEED, round_), client), 0)
            for _ in range(-(-epochs * -(-len(x) // BATCH) // batches)):
                one, two, *three = [(x[b], y[b]) for b in itertools.islice(stream, batches)]
                w = [p.detach().clone() for p in own.parameters()]
                inner = gradient_at(own, w, *one)
                for norm in norms:
                    norm.momentum = 0.0
                outer = gradient_at(
                    own, [p - alpha * g for p, g in zip(w, inner, strict=True)], *two
                )
                if three:
                    up, down = (
                        gradient_at(
                            own,
                            [p + sign * delta * v for p, v in zip(w, outer, strict=True)],
                            *three[0],
                        )
                        for sign in (1, -1)
                    )
                    outer = [
                        v - alpha * (u - d) / (2 * delta)
                        for v, u, d in zip(outer, up, down, strict=True)
                    ]
                for norm in norms:
                    norm.momentum = 0.1
                for p, g in zip(own.parameters(), outer, strict=True):
                    p.grad = g
                optimizer.step()
            sent.append(tensors(own))
        module.load_state_dict(average(sent, [SIZES[client] for client in cohort]), strict=False)
    return tensors(module)


# ---- rounds --------------------------------------------------------------------------------------


@CHUNKS
@pytest.mark.parametrize("make", [mlp, normalised], ids=["mlp", "bn"])
@pytest.mark.parametrize("delta", [None, 0.01], ids=["FO", "HF"])
def test_rounds_equal_plain_pytorch(delta, make, chunk):
    options = {} if delta is None else {"hessian": True, "delta": delta}
    found = played(
        build("perfedavg", alpha=0.2, weights="size", **options), make(), chunk=chunk, epochs=3
    )
    wanted = meta_rounds(make(), COHORTS, alpha=0.2, delta=delta, epochs=3)
    # Finite differences divide rounding by 2 δ.
    assert distance(found.model, wanted, NOISE) <= 1e-9


def test_clients_count_alike_unless_size_is_asked_for():
    assert build("perfedavg").weights == "uniform"
    assert build("perfedavg", weights="size").weights == "size"
    assert build("fedavg").weights == "size"


def test_an_epoch_has_half_or_a_third_of_the_steps():
    batches = [-(-size // BATCH) for size in SIZES]
    for hessian, parts in ((False, 2), (True, 3)):
        reports = (
            played(build("perfedavg", hessian=hessian), mlp(), [EVERYONE], epochs=4)
            .updates[0]
            .reports
        )
        assert reports["steps"].tolist() == [-(-4 * b // parts) for b in batches]


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 10])
@pytest.mark.parametrize("hessian", [False, True])
def test_without_an_inner_step_it_is_fedavg(hessian, chunk):
    """On whole splits, so that FedAvg takes the gradient on the same batch."""
    how = {"chunk": chunk, "batch_size": max(SIZES), "steps": 3}
    found = played(build("perfedavg", alpha=0.0, hessian=hessian, weights="size"), mlp(), **how)
    plain = played("fedavg", mlp(), **how)
    assert distance(found.model, plain.model) <= 1e-9
    found, plain = (played_.updates[0].reports["train_loss"] for played_ in (found, plain))
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


def test_without_an_inner_step_it_is_fedavg_on_every_second_batch():
    found = played(build("perfedavg", alpha=0.0, weights="size"), mlp(), [[2]], epochs=4)
    own = mlp()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    x, y = held_by(images(sizes=SIZES), 2)
    batches = list(hand_batches(len(x), fold(fold(SEED, 0), 2), 0, 4))
    for batch in batches[1::2]:
        optimizer.zero_grad()
        F.cross_entropy(own(x[batch]), y[batch]).backward()
        optimizer.step()
    assert distance(found.model, tensors(own)) <= 1e-9


# ---- second derivatives --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("delta", [1e-3, 10.0])
def test_on_a_quadratic_finite_differences_are_the_hessian(delta, chunk):
    """A step is w − β (I − α H)(H (w − α (H w − c)) − c), with f(w) = w·H w/2 − c·w + const."""
    federation, alpha, beta = random_regression([8, 12]), 0.05, 0.1
    method = build("perfedavg", alpha=alpha, hessian=True, delta=delta)
    how = {"steps": 1, "batch_size": 12, "optimizer": Sgd(lr=beta)}
    found = (
        play(method, federation, linear(), [[0, 1]], chunk=chunk, **how)
        .updates[0]
        .params["head.weight"]
    )
    w = linear().head.weight.detach()[0]
    for client in (0, 1):
        x, y = held_by(federation, client)
        hessian, c = 2 * x.T @ x / len(x), 2 * x.T @ y / len(x)
        ahead = w - alpha * (hessian @ w - c)
        wanted = w - beta * (hessian @ ahead - c - alpha * hessian @ (hessian @ ahead - c))
        torch.testing.assert_close(found[client, 0], wanted, rtol=0, atol=1e-11)


def test_elsewhere_the_error_of_finite_differences_falls_with_the_square_of_their_length():
    x, y = held_by(images(sizes=SIZES), 2)
    module = mlp()
    module.features[2] = nn.Tanh()
    names = [name for name, _ in module.named_parameters()]
    params = [p.detach() for p in module.parameters()]
    batches = [slice(0, 6), slice(6, 12), slice(12, 20)]

    def value(batch):
        def of(moving):
            z = torch.func.functional_call(
                module, dict(zip(names, moving, strict=True)), (x[batch],)
            )
            return F.cross_entropy(z, y[batch])

        return of

    values, alpha = [value(batch) for batch in batches], 0.3
    first_order = MetaGradient(alpha)(values, params)[1]
    _, product = torch.autograd.functional.hvp(
        lambda *p: values[2](list(p)), tuple(params), tuple(first_order)
    )
    exact = [v - alpha * h for v, h in zip(first_order, product, strict=True)]

    def error(gradient):
        return max(float((g - e).abs().max()) for g, e in zip(gradient, exact, strict=True))

    coarse, fine = (error(MetaGradient(alpha, delta)(values, params)[1]) for delta in (0.1, 0.01))
    assert fine < 1e-5 < error(first_order)
    assert coarse / fine == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(("hessian", "power"), [(False, 1), (True, 2)], ids=["FO", "HF"])
def test_the_global_model_settles_where_one_step_later_is_best(hessian, power):
    """Clients f_k = s_k² (w − t_k)² have curvature h_k = 2 s_k².

    With single steps, w ends at the mean of t_k weighted by h_k (1 − α h_k)^p, with p = 2 for the
    true gradient of f_k(w − α f_k'(w)), and p = 1 without second derivatives.
    """
    slopes, centres, alpha = (
        torch.tensor([1.0, 2.0]).double(),
        torch.tensor([3.0, -1.0]).double(),
        0.1,
    )
    federation = Federation.from_arrays(
        slopes[:, None], slopes * centres, clients=[0, 1], splits=(1, 0, 0), task="regression"
    )
    method = build("perfedavg", alpha=alpha, hessian=hessian)
    found = play(method, federation, scalar(), [[0, 1]] * 60, steps=1, optimizer=Sgd(lr=0.5))
    curvature = 2 * slopes**2
    shares = curvature * (1 - alpha * curvature) ** power
    assert weight(found.model) == pytest.approx(
        float((shares * centres).sum() / shares.sum()), abs=1e-9
    )


def test_without_alpha_the_inner_step_follows_the_learning_rate():
    def square(params):
        return params[0].square().sum(1)

    params = [torch.tensor([[4.0], [2.0]])]
    losses, gradients = MetaGradient().at_rate(torch.tensor([0.25, 0.5]).double())(
        [square, square], params
    )
    # After the inner step w is 4 − 0.25 · 8 = 2 and 2 − 0.5 · 4 = 0.
    assert losses.tolist() == [4.0, 0.0]
    assert gradients[0].tolist() == [[4.0], [0.0]]
    assert MetaGradient(0.1).at_rate(0.5) == MetaGradient(0.1)
    with pytest.raises(InputError, match="follows the learning rate"):
        MetaGradient()([square, square], params)


# ---- personal models -----------------------------------------------------------------------------


@CHUNKS
@pytest.mark.parametrize("steps", [1, 3])
def test_personal_models_are_inner_steps_away(steps, chunk):
    method = build("perfedavg", alpha=0.05, adapt_steps=steps)
    found = played(method, normalised(), COHORTS[:2], chunk=chunk)
    for client, whole in personal_models(found, method, [0, 2]).items():
        own = normalised()
        own.load_state_dict(found.model, strict=False)
        own.train()
        x, y = held_by(images(sizes=SIZES), client)
        stream = hand_batches(len(x), fold(fold(SEED, 1, Purpose.ADAPT), client), 0)
        for batch in itertools.islice(stream, steps):
            own.zero_grad()
            F.cross_entropy(own(x[batch]), y[batch]).backward()
            with torch.no_grad():
                for p in own.parameters():
                    p -= 0.05 * p.grad
        assert distance(whole, tensors(own), NOISE) <= 1e-9


def test_inner_steps_help_where_labels_are_skewed():
    found = scores({"name": "perfedavg", "alpha": 0.1})
    assert found["personal seen"] > found["global seen"] + 0.1
    assert found["personal unseen"] > found["global unseen"] + 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, r"perfedavg\.alpha must be at least 0 and finite, got -0\.1"),
        ({"alpha": float("nan")}, r"perfedavg\.alpha must be"),
        ({"delta": 0.0}, r"perfedavg\.delta must be above 0 and finite, got 0\.0"),
        ({"adapt_steps": 0}, r"perfedavg\.adapt_steps must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("perfedavg", **options)


def test_the_inner_step_of_personal_models_does_not_follow_the_schedule():
    """In the last round the learning rate is a thousandth, but α does not change."""
    data = targets(3.0, -1.0)
    schedule = Schedule(kind="exponential", decay=0.1)
    training = Training(rounds=4, batch_size=64, optimizer=Sgd(lr=0.1), schedule=schedule)
    machine = Machine(device="cpu", precision="float64")
    method = build("perfedavg", alpha=0.2)
    run = Trainer(data, method, scalar(1.0), training, machine, Evaluation(every=0), seed=0)
    run.run()
    w = weight(run.state.model)
    personal = run.personal_models(np.arange(2))[1]["head.weight"].flatten().tolist()
    assert personal == pytest.approx([w - 0.2 * 2 * (w - t) for t in (3.0, -1.0)], abs=1e-12)
