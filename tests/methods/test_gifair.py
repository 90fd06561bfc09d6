"""GIFAIR-FL: the paper's example and lemma, what is exchanged, limits, and its rate."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from equipoise.client_index import ClientIndex, make_index
from equipoise.data import load
from equipoise.engine.settings import Machine
from equipoise.engine.stacked import StackedEngine
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.method import State
from equipoise.methods import build, describe
from equipoise.methods.gifair import ordering
from equipoise.optimizers import Adam, Schedule, Sgd, optimizer_named
from equipoise.run.api import train
from equipoise.run.evaluation import Evaluation
from equipoise.tree import size_in_bytes
from tests import quick
from tests.engine.comparison import distance
from tests.engine.federations import THREE_COHORTS, images
from tests.engine.small_models import WITHOUT_GRADIENT, batchnorm, mlp
from tests.rounds import everyone_of, linear, play, random_regression, scalar, weight

NEVER = Evaluation(every=0)


def grouped(values, groups, samples=None):
    """Clients with loss (w - t)², as in ``tests.rounds.targets``, in groups."""
    counts = samples or [1] * len(values)
    return Federation.from_arrays(
        torch.ones(sum(counts), 1).double(),
        torch.tensor(np.repeat(values, counts), dtype=torch.float64),
        clients=np.repeat(np.arange(len(values)), counts),
        groups=dict(enumerate(groups)),
        splits=(1, 0, 0),
        task="regression",
    )


def factors_of(losses, sizes, groups, **options):
    """The step factors of all clients, given all losses before round 1."""
    sizes, groups = np.asarray(sizes), np.asarray(groups)
    everyone = everyone_of(
        range(len(sizes)),
        sizes=sizes,
        groups=groups,
        key=0,
        prior=torch.from_numpy(sizes / sizes.sum()),
        evaluate=lambda params, split: {"loss": torch.as_tensor(losses, dtype=torch.float64)},
    )
    aggregation = build("gifair", **options).aggregation
    state = aggregation.begin(State(0, {"w": torch.zeros(1)}), everyone)
    return aggregation.send(state, everyone)[1]["step_factor"].numpy()


# ---- Lemma 1 -------------------------------------------------------------------------------------


def test_the_papers_example_1():
    """Four groups of ten clients with L1 > L2 > L3 > L4: 1 ± 3λ/(10 p_k) and 1 ± λ/(10 p_k)."""
    draws = np.random.default_rng(0)
    groups = np.repeat([2, 0, 3, 1], 10)
    sizes = draws.integers(5, 50, size=40)
    losses = np.array([3.0, 1.0, 4.0, 2.0])[groups] + draws.uniform(-0.1, 0.1, size=40)
    p, lam = sizes / sizes.sum(), 1e-3
    # From the highest loss down: groups 2, 0, 3, 1.
    wanted = 1 + lam * np.array([1, -3, 3, -1])[groups] / (10 * p)
    np.testing.assert_allclose(
        factors_of(losses, sizes, groups, lam=lam, relative=False), wanted, atol=1e-14
    )


@pytest.mark.parametrize("fairness", ["group", "individual"])
@pytest.mark.parametrize("seed", range(5))
def test_lemma_1_turns_the_spread_into_factors(seed, fairness):
    draws = np.random.default_rng(seed)
    sizes, groups = draws.integers(1, 30, size=12), draws.integers(0, 4, size=12) * 3
    # Rounded losses, so that some clients and groups tie.
    losses = draws.integers(0, 5, size=12) / 2
    p = sizes / sizes.sum()
    kinds = (
        [groups == g for g in np.unique(groups)]
        if fairness == "group"
        else list(np.eye(12, dtype=bool))
    )
    means = [losses[kind].mean() for kind in kinds]
    lam = (
        0.9
        * min(p[k] * kind.sum() for kind in kinds for k in np.flatnonzero(kind))
        / (len(kinds) - 1)
    )
    spread = sum(abs(a - b) for i, a in enumerate(means) for b in means[:i])
    factors = factors_of(losses, sizes, groups, lam=0.9, fairness=fairness)
    assert (p * factors * losses).sum() == pytest.approx(
        (p * losses).sum() + lam * spread, abs=1e-13
    )
    assert factors.min() > 0
    assert (p * factors).sum() == pytest.approx(1, abs=1e-13)


def test_the_ordering_and_its_ties():
    assert ordering(torch.tensor([4.0, 3.0, 2.0, 1.0])).tolist() == [3, 1, -1, -3]
    assert ordering(torch.tensor([1.0, 1.0, 1.0])).tolist() == [0, 0, 0]
    assert ordering(torch.tensor([2.0, 5.0, 2.0, 0.0, 5.0])).tolist() == [-1, 3, -1, -4, 3]
    assert ordering(torch.tensor([7.0])).tolist() == [0]
    values = torch.from_numpy(np.random.default_rng(1).integers(0, 6, size=30).astype(float))
    assert ordering(values).tolist() == [
        float(sum(np.sign(a - b) for b in values.tolist())) for a in values.tolist()
    ]


def test_a_group_gains_at_most_what_the_smallest_group_has():
    """Σ p_k · factor over a group is P + λ r: λ_max allows little change if a group is small."""
    sizes, groups = [8, 8, 8, 8, 8, 8, 1, 1], [0, 0, 0, 0, 1, 1, 2, 2]
    factors = factors_of([1.0, 1, 1, 1, 2, 2, 3, 3], sizes, groups, lam=0.999)
    p = np.array(sizes) / 50
    shares = [(p * factors)[np.array(groups) == g].sum() for g in range(3)]
    # λ_max = min(8/50·4, 8/50·2, 1/50·2)/2 = 0.02.
    assert shares == pytest.approx([0.64 - 2 * 0.01998, 0.32, 0.04 + 2 * 0.01998], abs=1e-12)


# ---- λ -------------------------------------------------------------------------------------------


def test_lambda_is_a_fraction_of_its_largest_value_or_absolute():
    sizes, groups, losses = [1, 2, 3, 4], [0, 0, 1, 1], [4.0, 4.0, 1.0, 1.0]
    # p_1 |A| / (d - 1) = 0.1 · 2.
    np.testing.assert_allclose(
        factors_of(losses, sizes, groups, lam=0.25),
        factors_of(losses, sizes, groups, lam=0.05, relative=False),
        atol=1e-15,
    )
    assert factors_of(losses, sizes, groups, lam=0.25)[0] == pytest.approx(1 + 0.05 / 0.2)


def test_a_lambda_that_reverses_a_client_is_refused_by_name_of_the_limit():
    for lam in (0.2, 5.0):
        with pytest.raises(
            InputError,
            match=rf"gifair\.lam must be below λ_max = 0\.2 for this federation.*got {lam}",
        ):
            factors_of([4.0, 4.0, 1.0, 1.0], [1, 2, 3, 4], [0, 0, 1, 1], lam=lam, relative=False)
    factors_of([4.0, 4.0, 1.0, 1.0], [1, 2, 3, 4], [0, 0, 1, 1], lam=0.1999, relative=False)


def test_a_refused_lambda_leaves_no_directory(tmp_path):
    with pytest.raises(InputError, match="λ_max"):
        train(
            load("digits"),
            method={"name": "gifair", "lam": 0.9, "relative": False},
            rounds=1,
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lam": 1.0},
            r"gifair\.lam must be a fraction of λ_max in \[0, 1\), or absolute with "
            r"relative=False, got 1\.0",
        ),
        ({"lam": -0.1}, r"gifair\.lam must be a fraction"),
        ({"lam": float("nan")}, r"gifair\.lam must be a fraction"),
        ({"lam": -0.1, "relative": False}, r"gifair\.lam must be at least 0, got -0\.1"),
        ({"fairness": "groups"}, "'groups' in gifair.fairness; did you mean 'group'"),
        ({"exact": True, "personal": True}, r"gifair\.exact uses losses of the global model"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build("gifair", **options)


def test_personal_models_need_the_methods_own_local_rule():
    build("fedprox", aggregation={"name": "gifair"})
    with pytest.raises(
        InputError,
        match="Gifair keeps personal parts in its own local rule, which FedProx replaces",
    ):
        build("fedprox", aggregation={"name": "gifair", "personal": True})


# ---- rounds by hand ------------------------------------------------------------------------------

VALUES, GROUPS, SAMPLES = (3.0, -1.0, 0.5, 2.0), ("a", "a", "b", "c"), [1, 3, 2, 2]


def rounds_by_hand(cohorts, *, start, lam, mean, exact):
    """Algorithm 2 for F_k(w) = (w - t_k)², one step of rate 0.1; return w and stored losses."""
    p = [n / sum(SAMPLES) for n in SAMPLES]
    members = {g: [k for k, of in enumerate(GROUPS) if of == g] for g in "abc"}
    largest = min(p[k] * len(members[GROUPS[k]]) for k in range(4)) / 2
    w, losses = start, [(start - t) ** 2 for t in VALUES]
    for cohort in cohorts:
        means = {g: sum(losses[k] for k in ks) / len(ks) for g, ks in members.items()}
        sent = {}
        for k in cohort:
            r = sum(np.sign(means[GROUPS[k]] - other) for other in means.values())
            factor = 1 + lam * largest * r / (p[k] * len(members[GROUPS[k]]))
            sent[k] = w - 0.1 * factor * 2 * (w - VALUES[k])
        if mean == "plain":
            w = sum(sent.values()) / len(cohort)
        else:
            w = w + sum(4 / len(cohort) * p[k] * (sent[k] - w) for k in cohort)
        for k in cohort:
            losses[k] = ((w if exact else sent[k]) - VALUES[k]) ** 2
    return w, losses


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mean", ["plain", "weighted"])
@pytest.mark.parametrize(
    "cohorts", [[range(4)] * 3, [[0, 2], [1, 2], [3], [0, 1, 3]]], ids=["full", "partial"]
)
def test_rounds_equal_the_papers_algorithm(cohorts, mean, exact):
    around = {"weights": "uniform", "sampling": "size"} if mean == "plain" else {}
    method = build("gifair", lam=0.8, exact=exact, **around)
    how = {"steps": 1, "batch_size": 10, "optimizer": Sgd(lr=0.1)}
    played = play(method, grouped(VALUES, GROUPS, SAMPLES), scalar(1.0), cohorts, **how)
    w, losses = rounds_by_hand(cohorts, start=1.0, lam=0.8, mean=mean, exact=exact)
    assert weight(played.model) == pytest.approx(w, abs=1e-13)
    assert played.states[-1].server["clients"]["loss"].tolist() == pytest.approx(losses, abs=1e-12)


def test_weights_that_do_not_sum_to_one_lose_nothing_of_the_model():
    """Clients without an update leave θ unchanged, although (K/|S|) Σ p_k is far from one."""
    federation = grouped((5.0, 5.0, 5.0), "aab", [1, 1, 10])
    played = play(build("gifair"), federation, scalar(5.0), [[0, 1], [2]], steps=1)
    assert weight(played.model) == 5.0


def test_clients_never_seen_count_with_their_loss_of_the_first_model():
    # At w = 0 the losses are 9 (a), 1 (b), 4 (c): r = 2, -2, 0, although only b takes part in the
    # first rounds.
    federation = grouped((3.0, 1.0, -2.0), "abc")
    played = play(
        build("gifair", lam=0.6),
        federation,
        scalar(0.0),
        [[1], [2], [0]],
        steps=1,
        optimizer=Sgd(lr=0.01),
    )
    assert played.states[0].server["clients"]["loss"].tolist() == [9.0, 1.0, 4.0]
    found = [
        build("gifair").aggregation.send(state, cohort)[1]["step_factor"].item()
        for state, cohort in zip(played.states, played.cohorts, strict=False)
    ]
    # p|A| = 1/3 for all, so λ = 0.6/6 and the factor is 1 + 0.3 r.
    assert found == pytest.approx([0.4, 1.0, 1.6], abs=1e-13)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_the_factor_scales_steps_of_any_optimizer(name):
    """Adam's first step is the learning rate itself, whatever the size of the loss."""
    optimizer = (
        Adam(lr=0.01, eps=1e-15)
        if name == "adam"
        else optimizer_named("rmsprop", lr=0.01, alpha=0.0, eps=1e-15)
    )
    federation = grouped((3.0, 1.0, -2.0), "abc")
    played = play(
        build("gifair", lam=0.6), federation, scalar(0.0), [range(3)], steps=1, optimizer=optimizer
    )
    found = played.updates[0].params["head.weight"].flatten().tolist()
    assert found == pytest.approx([0.01 * 1.6, 0.01 * 0.4, -0.01], rel=1e-9)


# ---- limits --------------------------------------------------------------------------------------


def in_groups(federation, groups):
    """The same federation, with clients in groups of these numbers."""
    return Federation(
        x=federation.x,
        y=federation.y,
        train=federation.train,
        val=federation.val,
        test=federation.test,
        groups=np.asarray(groups),
        group_names=tuple("abcdefghij"[: max(groups) + 1]),
        unseen=federation.unseen,
        task=federation.task,
        classes=federation.classes,
        client_names=federation.client_names,
    )


THIRDS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
HOW = {"batch_size": 8, "epochs": 2, "optimizer": Sgd(lr=0.05, momentum=0.9)}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"lam": 0.0}, THIRDS),
        ({"lam": 0.0, "exact": True, "fairness": "individual"}, THIRDS),
        ({"lam": 0.9}, [0] * 10),
        ({"lam": 50.0, "relative": False}, [0] * 10),
    ],
    ids=["no weight", "no weight between clients", "one group", "one group, any weight"],
)
def test_without_weight_or_with_one_group_it_is_fedavg(options, groups):
    federation = in_groups(images(), groups)
    everyone = [range(10)] * 2
    fair = play(build("gifair", **options), federation, batchnorm(), everyone, **HOW)
    plain = play(build("fedavg"), federation, batchnorm(), everyone, **HOW)
    assert distance(fair.model, plain.model, WITHOUT_GRADIENT) <= 1e-9
    some = play(
        build("gifair", weights="uniform", **options), federation, mlp(), THREE_COHORTS, **HOW
    )
    plain = play(build("fedavg", weights="uniform"), federation, mlp(), THREE_COHORTS, **HOW)
    assert distance(some.model, plain.model) <= 1e-9


def test_individual_fairness_is_group_fairness_with_every_client_its_own_group():
    alone = play(
        build("gifair", fairness="individual"),
        in_groups(images(), THIRDS),
        mlp(),
        THREE_COHORTS,
        **HOW,
    )
    groups = play(
        build("gifair"), in_groups(images(), list(range(10))), mlp(), THREE_COHORTS, **HOW
    )
    assert distance(alone.model, groups.model) <= 1e-12
    thirds = play(build("gifair"), in_groups(images(), THIRDS), mlp(), THREE_COHORTS, **HOW)
    assert distance(alone.model, thirds.model) > 1e-4


@pytest.mark.parametrize(
    "options", [{}, {"exact": True}, {"personal": True}, {"fairness": "individual"}], ids=str
)
@pytest.mark.parametrize("make", [mlp, batchnorm], ids=["mlp", "bn"])
def test_stacked_equals_one_by_one(make, options):
    federation, method = in_groups(images(), THIRDS), build("gifair", lam=0.9, **options)
    one, all_ = (
        play(method, federation, make(), THREE_COHORTS, chunk=chunk, **HOW) for chunk in (1, 10)
    )
    assert distance(all_.model, one.model, WITHOUT_GRADIENT) <= 1e-9
    losses = [played.states[-1].server["clients"]["loss"] for played in (all_, one)]
    torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)


def test_batchnorm_statistics_are_averaged_with_weights_that_sum_to_one():
    federation = in_groups(images(), THIRDS)
    # The largest client and a small one: (K/|S|) Σ p_k is 10/2 · 60/150 = 2.
    played = play(build("gifair", lam=0.9), federation, batchnorm(), [[2, 4]], **HOW)
    sent, new = (
        played.updates[0].buffers["features.1.running_var"],
        played.model["features.1.running_var"],
    )
    torch.testing.assert_close(new, (7 * sent[0] + 53 * sent[1]) / 60, rtol=0, atol=1e-13)


# ---- the door ------------------------------------------------------------------------------------


def test_besides_the_model_one_number_a_client_is_sent(monkeypatch):
    """Remark 3: neither p_k nor |A| nor r_k can be derived from it."""
    from equipoise.engine.cohort import StackedCohort

    crossed = []
    original = StackedCohort.train

    def listening(self, shared, each, local):
        crossed.append((shared, each))
        return original(self, shared, each, local)

    monkeypatch.setattr(StackedCohort, "train", listening)
    federation = grouped((3.0, -1.0, 0.5, 2.0), "abcc", [2, 4, 2, 1])
    played = play(build("gifair"), federation, scalar(0.0), [[0, 3]], steps=1)
    (shared, each), cohort = crossed[0], played.cohorts[0]
    assert set(shared) == {"model"}
    assert set(shared["model"]) == {"head.weight"}
    assert set(each) == {"step_factor"}
    assert each["step_factor"].shape == (2,)
    assert cohort.bytes_down == 2 * (8 + 8), "a weight and a number to each"
    assert set(played.updates[0].reports) == {"train_loss", "steps", "loss_after"}


def test_what_everyone_is_asked_before_round_1_is_counted_there(tmp_path):
    federation = in_groups(images(), THIRDS)
    how = {"method": "gifair", "batch_size": 8, "cohort": 4, "evaluation": NEVER}
    run = train(federation, model=mlp(), rounds=3, out=tmp_path / "run", **how)
    rows = list(run.trainer.rounds)
    model = size_in_bytes(run.trainer.state.model)
    assert rows[0]["bytes_down"] - rows[1]["bytes_down"] == 10 * model
    # Loss and accuracy, float64.
    assert rows[0]["bytes_up"] - rows[1]["bytes_up"] == 10 * 2 * 8
    assert run.summary["bytes_down"] == sum(row["bytes_down"] for row in rows)
    assert rows[1]["bytes_down"] == rows[2]["bytes_down"] == 4 * (model + 8)


def test_everyone_is_gathered_only_for_methods_that_ask(monkeypatch):
    gathered = []
    original = StackedEngine.cohort

    def listening(self, method, clients, round_):
        gathered.append(len(clients))
        return original(self, method, clients, round_)

    monkeypatch.setattr(StackedEngine, "cohort", listening)
    for name, wanted in (("fedavg", [4, 4]), ("gifair", [10, 4, 4])):
        gathered.clear()
        train(
            images(), method=name, model=mlp(), rounds=2, batch_size=8, cohort=4, evaluation=NEVER
        )
        assert gathered == wanted


def test_a_broken_run_goes_on_as_if_nothing_had_happened(tmp_path):
    federation = in_groups(images(), THIRDS)
    machine = Machine(device="cpu", precision="float64", chunk="measure")
    method = {"name": "gifair", "personal": True}
    how = {
        "method": method,
        "rounds": 4,
        "batch_size": 8,
        "cohort": 4,
        "machine": machine,
        "evaluation": NEVER,
    }

    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(federation, model=mlp(), out=tmp_path / "run", on_round=stop, **how)
    again = train(federation, model=mlp(), out=tmp_path / "run", resume=True, **how)
    how["machine"] = Machine(
        device="cpu", precision="float64", chunk=again.config["resolved"]["chunk"]
    )
    whole = train(federation, model=mlp(), **how)
    assert distance(again.trainer.state.model, whole.trainer.state.model) == 0
    assert again.summary["bytes_down"] == whole.summary["bytes_down"]
    for client in (0, 7):
        one, other = again.model(client).state_dict(), whole.model(client).state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)


# ---- GIFAIR-FL-Per -------------------------------------------------------------------------------


def test_clients_keep_the_model_they_last_trained():
    federation = in_groups(images(), THIRDS)
    cohorts = [[0, 1, 2], [1, 5], [2]]
    played = play(build("gifair", personal=True), federation, batchnorm(), cohorts, **HOW)
    plain = play(build("gifair"), federation, batchnorm(), cohorts, **HOW)
    assert distance(played.model, plain.model, WITHOUT_GRADIENT) <= 1e-12, (
        "the global model is that of GIFAIR-FL-Global"
    )
    start = {
        "personal." + name: torch.full_like(tensor, torch.nan)
        for name, tensor in played.model.items()
    }
    kept = played.engine.memory.read(np.array([0, 1, 2, 5]), {"kept": start})[0]["kept"]
    for row, (round_, place) in enumerate([(0, 0), (1, 0), (2, 0), (1, 1)]):
        updates = played.updates[round_]
        sent = {**updates.params, **updates.buffers}
        assert {"personal." + name for name in sent} == set(kept)
        assert all(
            torch.equal(kept["personal." + name][row], stack[place]) for name, stack in sent.items()
        )
    assert [c.bytes_up for c in played.cohorts] == [c.bytes_up for c in plain.cohorts], (
        "personal models never travel"
    )


def test_personal_models_are_evaluated_beside_the_global_one():
    digits = load("digits")
    run = train(digits, method={"name": "gifair", "personal": True}, rounds=3, cohort=0.5)
    assert set(run.summary["results"]) == {"global", "personal"}
    found = {
        (row["client"], row["model"]): row["accuracy"]
        for row in run.trainer.metrics
        if row["split"] == "test"
    }
    for client in range(digits.clients):
        rows = torch.from_numpy(digits.test.of(client))
        for model, module in (("personal", run.model(client)), ("global", run.model())):
            with torch.no_grad():
                right = (module(digits.x[rows]).argmax(1) == digits.y[rows]).double().mean().item()
            assert found[client, model] == pytest.approx(right, abs=1e-12)


# ---- what it shows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "distinct"), [(2, 3), (1, 2), (5, 1)], ids=["apart", "two tie", "all tie"]
)
def test_on_ridge_regression_the_objective_falls_at_the_rate_of_theorem_1(seed, distinct):
    """H(θ) - H* is O(1/T) on a strongly convex problem, with learning rates that fall as 1/t.

    If groups tie at the minimum, H has a kink there.
    """
    ridge, rounds, steps = 0.1, 800, 2
    federation = in_groups(
        random_regression([12, 20, 8, 30, 16, 14], seed=seed), [0, 0, 1, 1, 2, 2]
    )
    held = [federation.train.of(k) for k in range(6)]
    data = [(federation.x[rows].numpy(), federation.y[rows].numpy()) for rows in held]
    p = np.array([len(rows) for rows in held]) / 100
    lam = 0.8 * (2 * p).min() / 2

    def group_losses(theta):
        losses = np.array([np.mean((x @ theta - y) ** 2) for x, y in data])
        return (p * losses).sum() + ridge / 2 * theta @ theta, losses.reshape(3, 2).mean(1)

    def objective(theta):
        fit, means = group_losses(theta)
        return fit + lam * sum(abs(a - b) for i, a in enumerate(means) for b in means[:i])

    # |a - b| is the larger of both signs, so H is the maximum of its values for all orderings, each
    # of which is convex.
    def under(order, z):
        fit, means = group_losses(z[:3])
        return z[3] - fit - lam * (np.array(order) * means).sum()

    orders = [{"type": "ineq", "fun": lambda z, o=o: under(o, z)} for o in permutations((2, 0, -2))]
    solved = minimize(
        lambda z: z[3],
        np.array([0, 0, 0, 10.0]),
        constraints=orders,
        method="SLSQP",
        options={"ftol": 1e-14},
    )
    least = objective(solved.x[:3])
    assert len(set(group_losses(solved.x[:3])[1].round(4))) == distinct
    plain = minimize(lambda theta: group_losses(theta)[0], np.zeros(3)).x
    assert objective(plain) > least + 1e-3, "FedAvg's solution would do"

    schedule = Schedule(
        kind="steps",
        at=tuple(range(rounds)),
        factors=tuple(1 / (1 + t / 20) for t in range(rounds)),
    )
    method = build("gifair", lam=0.8, exact=True)
    how = {
        "steps": steps,
        "batch_size": 30,
        "optimizer": Sgd(lr=0.1, weight_decay=ridge),
        "schedule": schedule,
    }
    played = play(method, federation, linear(), [range(6)] * rounds, **how)
    # The largest excess in the later part of each interval, because the ordering may change from
    # round to round.
    values = [objective(state.model["head.weight"].numpy()[0]) - least for state in played.states]
    marks = [50, 100, 200, 400, 800]
    excess = [max(values[mark // 2 : mark + 1]) for mark in marks]
    assert min(values) >= -1e-7
    assert all(after < 0.75 * before for before, after in pairwise(excess)), excess
    assert (
        max(mark * value for mark, value in zip(marks, excess, strict=True))
        < 2 * marks[0] * excess[0]
    ), excess


# ---- groups from a client index ------------------------------------------------------------------


def test_clusters_of_an_index_are_groups(tmp_path):
    """The same factors as with these groups in the data."""
    draws = np.random.default_rng(0)
    groups, sizes, losses = (
        np.array([0, 1, 0, 1, 1, 0]),
        draws.integers(5, 50, size=6),
        draws.uniform(1, 2, size=6),
    )
    features = torch.from_numpy(np.eye(2)[groups] + 0.05 * draws.uniform(size=(6, 2)))
    ClientIndex(np.arange(6), features, torch.ones(6, 1)).write(tmp_path / "index")
    options = {"index": str(tmp_path / "index"), "clusters": 2}
    wanted = factors_of(losses, sizes, groups)
    np.testing.assert_allclose(
        factors_of(losses, sizes, np.zeros(6), **options), wanted, rtol=1e-12
    )
    others = factors_of(losses, sizes, np.zeros(6), **options | {"clusters": 3}, choice="fixed")
    assert not np.allclose(others, wanted)
    one = factors_of(losses, sizes, np.zeros(6), **options, compare="labels")
    assert one.tolist() == [1.0] * 6


def test_groups_of_digits_are_found_by_an_index_of_their_amplitudes(tmp_path):
    """The data have no groups.

    The groups of the index are the five styles, so training is the same as with named groups.
    """
    digits = load("digits")
    make_index(digits, lambda x, y: (torch.fft.rfft2(x).abs().flatten(1), torch.eye(10)[y])).write(
        tmp_path / "index"
    )
    nameless = in_groups(digits, np.zeros(digits.clients, np.int64))
    method = {"name": "gifair", "lam": 0.9, "index": str(tmp_path / "index"), "compare": "features"}
    run, known = (
        train(data, method=chosen, model="logistic", rounds=2)
        for data, chosen in ((nameless, method), (digits, {"name": "gifair", "lam": 0.9}))
    )
    clusters = next(iter(run.trainer.rounds))["notes"]["clusters"]
    assert clusters == digits.groups.tolist()
    assert distance(run.trainer.state.model, known.trainer.state.model) == 0
    assert describe(run.trainer.method)["digest"] == ClientIndex.read(tmp_path / "index").digest()


def test_an_index_makes_groups_and_not_single_clients():
    with pytest.raises(InputError, match="gifair.index makes groups of clients"):
        build("gifair", fairness="individual", index="index")
    with pytest.raises(InputError, match="gifair.digest belongs to gifair.index, which is missing"):
        build("gifair", digest="abc")


@pytest.mark.parametrize("seed", quick.only([0], range(5)))
def test_groups_of_digits_come_closer_than_under_fedavg(seed):
    """With groups of equal size λ_max is large, and the mean does not decrease."""
    digits = load("digits", imbalance=1.0, seed=seed)
    found = {}
    for name, options in (("fedavg", {}), ("gifair", {"lam": 0.9})):
        how = {
            "rounds": 60,
            "batch_size": 20,
            "optimizer": Sgd(lr=0.1),
            "evaluation": Evaluation(every=60),
        }
        run = train(digits, method={"name": name, **options}, seed=seed, **how)
        found[name] = run.summary["results"]["global"]["seen"]
    assert found["gifair"]["sigma_groups"] < 0.75 * found["fedavg"]["sigma_groups"], found
    assert found["gifair"]["mean"] > found["fedavg"]["mean"] - 0.01, found


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        # Client 5 alone is a group with a thousandth of the samples, so λ_max is small for all
        # others.
        ([300, 300, 200, 199, 1], {}, True),
        ([300, 300, 200, 199, 1], {"lam": 0.0}, False),
        ([300, 300, 200, 199, 1], {"fairness": "individual"}, True),
        ([200, 200, 200, 200, 200], {}, False),
        ([200, 200, 200, 200, 200], {"lam": 0.009}, True),
    ],
)
def test_it_says_once_when_nothing_is_left_to_redistribute(sizes, options, says, caplog):
    factors = factors_of([1.0, 2.0, 3.0, 4.0, 5.0], sizes, [0, 0, 1, 1, 2], **options)
    assert len(caplog.messages) == says
    if says:
        assert "nearly FedAvg" in caplog.messages[0]
        assert np.abs(factors[:4] - 1).max() <= 0.01
