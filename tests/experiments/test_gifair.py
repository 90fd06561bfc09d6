"""GIFAIR-FL's experiments match the paper, except for declared differences."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path

import pytest

from equipoise.study import load_study
from tests.experiments.scripts import load_script
from tests.experiments.stand_ins import write_cifar

HOME = Path(__file__).parents[2] / "experiments" / "gifair"
TABLES = ["gender", "letters", "original", "shakespeare", "skewed", "threegroups"]
IMAGES = ["letters", "original", "skewed", "threegroups"]
TEXT = ["gender", "lambda", "shakespeare"]
GROUPS = ["gender", "threegroups"]


@cache
def study(name, *, tune=False):
    """Read a study once, because it has many experiments."""
    return load_study(HOME / f"{name}.yaml", tune=tune)


def experiments(name):
    return {job.method: job.experiment for job in study(name).jobs}


def test_every_table_and_the_figure_are_there():
    assert sorted(path.stem for path in HOME.glob("*.yaml")) == sorted(
        [*TABLES, "lambda", "skewed-cifar10"]
    )


@pytest.mark.parametrize("name", TABLES)
def test_every_method_of_the_comparison_is_there(name):
    found = {job.method for job in study(name).jobs}
    tilted = {"gender": {"term-group"}, "threegroups": {"term", "term-group"}}.get(name, {"term"})
    assert (
        found
        == {"fedavg", "qffl", "afl", "fedmgda", "ditto", "gifair-global", "gifair-per"} | tilted
    )
    assert {job.seed for job in study(name).jobs} == {1, 2, 3}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_trained_on_as_in_section_5_1_3(name):
    for experiment in experiments(name).values():
        training = experiment.training
        assert (training.cohort, training.epochs, training.batch_size) == (10, 2, 32)
        assert (training.optimizer.lr, training.schedule.factor(1, 100)) == (0.1, 0.99)
        assert (experiment.model["name"], experiment.data["splits"]) == ("cnn2", (0.7, 0.1, 0.2))


@pytest.mark.parametrize("name", TEXT)
def test_text_is_trained_on_alike(name):
    for experiment in experiments(name).values():
        training = experiment.training
        assert (training.cohort, training.steps, training.batch_size, training.rounds) == (
            10,
            30,
            10,
            100,
        )
        assert training.optimizer.lr == 0.8
        # Clients are sampled by size and weighted equally, as in algorithm 2.
        assert (experiment.method.sampler.name, experiment.method.weights) == ("size", "uniform")
        model = experiment.model
        assert (model["name"], model["embedding"], model["hidden"], model["layers"]) == (
            "charlstm",
            8,
            256,
            2,
        )


def test_federations_are_the_papers():
    partition = experiments("skewed")["fedavg"].data["partition"]
    assert partition == {
        "name": "skewed",
        "scale": 1.0,
        "clients": 100,
        "classes": 5,
        "images": 100,
    }
    assert experiments("shakespeare")["fedavg"].data["roles"] == 31
    for name in ("gender", "lambda"):
        assert next(iter(experiments(name).values())).data["roles"] == {"male": 25, "female": 10}
    assert experiments("original")["fedavg"].data["clients"] == 500


@pytest.mark.parametrize("name", TABLES)
def test_who_is_to_be_treated_alike(name):
    for label in ("gifair-global", "gifair-per"):
        rule = experiments(name)[label].method.aggregation
        assert rule.fairness == ("group" if name in GROUPS else "individual")
        assert rule.personal == (label == "gifair-per")


@pytest.mark.parametrize("name", TABLES)
def test_tuning_has_a_seed_of_its_own_and_looks_at_validation_data(name):
    tuned = study(name, tune=True)
    assert (tuned.seeds, tuned.split) == ((0,), "val")
    assert tuned.tuning.by == ("group_gap" if name in GROUPS else "sigma_clients")
    assert tuned.methods[0] == "fedavg"
    chosen = experiments(name)
    for label, variants in tuned.tried.items():
        written = chosen[label].plain()["method"]
        assert any(
            all(written[key] == value for key, value in values.items())
            for values in variants.values()
        )


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_tuned_over_the_papers_grids(name):
    tried = study(name, tune=True).tried
    assert [values["q"] for values in tried["qffl"].values()] == [0, 0.001, 0.01, 0.1, 1, 2, 5, 10]
    assert [values["t"] for values in tried["term"].values()] == [1, 2, 5]
    assert [values["lam"] for values in tried["ditto"].values()] == [0.01, 0.05, 0.1, 0.5, 1, 2, 5]
    for label in ("gifair-global", "gifair-per"):
        assert [round(10 * values["lam"]) for values in tried[label].values()] == list(range(1, 10))


def test_the_figure_goes_from_fedavg_to_the_largest_lambda():
    strengths = [experiment.method.aggregation.lam for experiment in experiments("lambda").values()]
    assert strengths == sorted(strengths)
    assert strengths[0] == 0
    assert strengths[-1] > 0.9


def test_figure_4_reads_the_groups_of_every_strength_and_seed(tmp_path):
    accuracies = {("0.0", 1): (0.4, 0.2), ("0.0", 2): (0.5, 0.3), ("0.9", 1): (0.35, 0.3)}
    for (strength, seed), (male, female) in accuracies.items():
        folder = tmp_path / "base" / strength / f"seed{seed}"
        folder.mkdir(parents=True)
        results = {"global": {"seen": {"groups": {"male": male, "female": female}}}}
        (folder / "summary.json").write_text(json.dumps({"results": results}))
    figure = load_script(HOME / "figure4.py")
    found = figure.read(tmp_path)
    assert found == {
        "male": {0.0: [0.4, 0.5], 0.9: [0.35]},
        "female": {0.0: [0.2, 0.3], 0.9: [0.3]},
    }
    figure.draw(found, tmp_path / "figure4.svg")
    assert (tmp_path / "figure4.svg").stat().st_size > 1000


def test_figure_4_of_another_study_is_refused(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "base" / "fedavg" / "seed0"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    monkeypatch.setattr("sys.argv", ["figure4.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        load_script(HOME / "figure4.py").main()
    assert (
        "holds runs of another study: its methods are not called by values of λ"
        in capsys.readouterr().err
    )


# ---- CIFAR-10 ------------------------------------------------------------------------------------

FAIR = {
    "fedavg",
    "qffl",
    "term",
    "afl",
    "fedmgda",
    "ditto",
    "gifair-global",
    "gifair-exact",
    "gifair-per",
}


def test_images_of_cifar_are_divided_and_judged_as_the_file_says():
    written = study("skewed-cifar10")
    assert (set(written.methods), written.seeds, written.baseline) == (
        FAIR,
        (1, 2, 3, 4, 5),
        "fedavg",
    )
    for job in written.jobs:
        experiment = job.experiment
        partition = experiment.data["partition"]
        assert (partition["clients"], partition["classes"], partition["images"]) == (100, 5, 100)
        assert (experiment.model["name"], experiment.data["seed"]) == ("bncnn", 0)
        assert (experiment.training.rounds, experiment.training.cohort_size(100)) == (150, 10)
        assert (experiment.evaluation.every, experiment.evaluation.last) == (5, 8)
    tuned = study("skewed-cifar10", tune=True)
    assert (set(tuned.tried), tuned.seeds, tuned.split) == (FAIR - {"fedavg"}, (0,), "val")
    assert tuned.tuning.by == "sigma_clients"
    of_mnist = study("skewed", tune=True).tried
    for label in FAIR - {"fedavg", "gifair-exact"}:
        assert list(tuned.tried[label].values()) == list(of_mnist[label].values())
    chosen = {job.method: job.experiment.plain()["method"] for job in written.jobs}
    for label, variants in tuned.tried.items():
        assert any(values.items() <= chosen[label].items() for values in variants.values()), label


@pytest.fixture
def small(tmp_path):
    """The study on noise: ten clients, two per round, three rounds, the last two used."""
    root = write_cifar(tmp_path / "cifar", each=25)
    changes = [
        f"data.root={root}",
        "data.partition.clients=10",
        "data.partition.images=4",
        "model.channels=[2, 2]",
        "model.hidden=[4]",
        "training.cohort=2",
        "training.rounds=3",
        "training.epochs=1",
        "evaluation={every: 1, last: 2}",
        "machine={device: cpu}",
    ]
    return load_study(HOME / "skewed-cifar10.yaml", seeds=[1], overrides=changes)


def test_cifar_in_small(small, tmp_path):
    results = small.run(tmp_path / "runs")
    assert results.failures == {}
    for method in small.methods:
        personal = method in ("ditto", "gifair-per")
        for metric in small.metrics:
            assert len(results.values("base", method, metric)) == 1, (method, metric)
        assert results.models("base", small.metrics)[method] == (
            "personal" if personal else "global"
        )
    for summary in results.summaries.values():
        assert summary["tail"]["rounds"] == [2, 3]
    noise = load_script(HOME / "testing_noise.py")
    found = noise.read(tmp_path / "runs")
    assert set(found) == {f"base/{method}" for method in small.methods}
    ((sigma, of_testing, left),) = found["base/fedavg"]
    assert sigma == pytest.approx(results.values("base", "fedavg", "sigma_clients")[1])
    assert left == pytest.approx(max(0, sigma**2 - of_testing**2) ** 0.5)
    assert noise.table(found).splitlines()[2].startswith("| base/")


def test_noise_of_testing():
    noise = load_script(HOME / "testing_noise.py")
    accuracies, images = [0.9, 0.5, 0.7], [11, 21, 101]
    sigma, of_testing, left = noise.measure(accuracies, images)
    variance = (0.9 * 0.1 / 10 + 0.5 * 0.5 / 20 + 0.7 * 0.3 / 100) / 3
    assert sigma == pytest.approx(statistics.pstdev(accuracies))
    assert of_testing == pytest.approx(variance**0.5)
    assert left == pytest.approx((statistics.pvariance(accuracies) - variance) ** 0.5)
    assert noise.measure([0.5, 0.6], [5, 5])[2] == 0.0


def test_noise_without_a_study_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["testing_noise.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        load_script(HOME / "testing_noise.py").main()
    assert "holds no finished run of a study" in capsys.readouterr().err
