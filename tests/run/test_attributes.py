"""Runs on data with attributes: journals, summaries, all models, and settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from equipoise import Evaluation, Federation, Machine, train
from equipoise.config import experiment_from
from equipoise.errors import InputError
from equipoise.parity import FIGURES
from tests.attributed import attributed, by_hand, people

HOW = {"model": "logistic", "rounds": 2, "machine": Machine(device="cpu", precision="float64")}
EVERYTHING = Evaluation(min_cell=1)


def trained(federation=None, method="fedavg", evaluation=EVERYTHING, **options):
    return train(
        federation or attributed(), method=method, evaluation=evaluation, **{**HOW, **options}
    )


def predictions(model, data, samples):
    with torch.no_grad():
        return model(data.x[samples].double()).argmax(1).numpy()


def names_of(data, attribute, samples):
    of = data.attributes[attribute]
    return [of.names[code] for code in of.codes[samples]]


@pytest.mark.parametrize(("method", "chunk"), [("fedavg", 4), ("ditto", 4), ("ditto", 1)])
def test_rows_of_all_models_have_the_rates_of_their_clients(method, chunk):
    data = attributed()
    machine = Machine(device="cpu", precision="float64", chunk=chunk)
    run = trained(
        data, method, Evaluation(min_cell=1, local=True, keep_local=True), machine=machine
    )
    kinds = {"global": lambda _: run.model(), "local": run.local_model}
    kinds |= {"personal": run.model} if method == "ditto" else {}
    rows = [row for row in run.trainer.metrics if row["round"] == 2]
    assert {row["model"] for row in rows} == set(kinds)
    for row in rows:
        samples = data.split(row["split"]).of(row["client"])
        predicted = predictions(kinds[row["model"]](str(row["client"])), data, samples)
        assert set(row["attributes"]) == {"sex", "origin"}
        for attribute, found in row["attributes"].items():
            rates, spread = by_hand(
                data.y[samples] == 1, predicted == 1, names_of(data, attribute, samples)
            )
            assert found["withheld"] == 0
            for value, wanted in rates.items():
                assert {rate: found["values"][value][rate] for rate in wanted} == pytest.approx(
                    wanted, abs=1e-12
                )
            assert found["demographic_parity_difference"] == pytest.approx(
                spread["selection_rate"][0], abs=1e-12
            )


def test_the_summary_pools_the_samples_of_clients():
    data = attributed(unseen=[3])
    run = trained(data)
    part = run.summary["results"]["global"]
    assert set(part["seen"]["attributes"]) == {"sex", "origin"}
    for who, clients in (("seen", (0, 1, 2)), ("unseen", (3,))):
        samples = np.concatenate([data.test.of(client) for client in clients])
        predicted = predictions(run.model(), data, samples)
        rates, spread = by_hand(
            data.y[samples] == 1, predicted == 1, names_of(data, "sex", samples)
        )
        found = part[who]["attributes"]["sex"]
        for value, wanted in rates.items():
            assert {rate: found["values"][value][rate] for rate in wanted} == pytest.approx(
                wanted, abs=1e-12
            )
        odds = max(spread["tpr"][0], spread["fpr"][0])
        assert found["equalized_odds_difference"] == pytest.approx(odds, abs=1e-12)
        assert found["worst_value"] == min(rates, key=lambda value: rates[value]["accuracy"])
        over = found["over_clients"]["demographic_parity_difference"]
        assert over["clients"] == len(clients)
        assert over["worst_client_name"] == data.client_name(over["worst_client_id"])
    assert set(FIGURES) == set(part["seen"]["attributes"]["sex"]["over_clients"])


def test_small_cells_are_withheld_from_journals_and_counted():
    run = trained(evaluation=Evaluation(min_cell=6))
    rows = [row for row in run.trainer.metrics if (row["round"], row["split"]) == (2, "test")]
    held = []
    for row in rows:
        for found in row.get("attributes", {}).values():
            shown = sum(of["n"] for of in found["values"].values())
            assert found["withheld"] == row["n"] - shown
            assert all(of["n"] >= 6 for of in found["values"].values())
            assert all(
                min(of.get("positives", 6), of.get("negatives", 6)) in (0, *range(6, 99))
                for of in found["values"].values()
            )
        held.append(
            row["n"]
            - sum(
                of["n"]
                for of in row.get("attributes", {}).get("origin", {"values": {}})["values"].values()
            )
        )
    found = run.summary["results"]["global"]["seen"]["attributes"]["origin"]
    assert (found["withheld"], found["withheld_clients"]) == (sum(held), sum(1 for n in held if n))
    assert found["withheld"] > 0


def test_attributes_change_nothing_else():
    data = attributed()
    x, y, _ = people()
    plain = Federation.from_arrays(x, y, clients=np.arange(len(y)) % 4)
    one, other = trained(data), trained(plain)
    for tensor, expected in zip(one.model().parameters(), other.model().parameters(), strict=True):
        assert torch.equal(tensor, expected)
    strip = [
        {name: value for name, value in row.items() if name != "attributes"}
        for row in one.trainer.metrics
    ]
    assert strip == list(other.trainer.metrics)
    assert "attributes" not in other.summary["results"]["global"]["seen"]


def test_clients_that_share_test_samples_are_counted_each():
    x, y, attributes = people()
    from equipoise.data.federate import federate
    from equipoise.data.partition import Iid
    from equipoise.data.source import Source

    source = Source(x=torch.from_numpy(x), y=torch.from_numpy(y), attributes=attributes)
    run = trained(federate(source, Iid(3), test="group"))
    rows = [row for row in run.trainer.metrics if (row["round"], row["split"]) == (2, "test")]
    assert rows[0]["attributes"] == rows[1]["attributes"] == rows[2]["attributes"]
    pooled = run.summary["results"]["global"]["seen"]["attributes"]["sex"]["values"]["Female"]
    assert pooled["n"] == 3 * rows[0]["attributes"]["sex"]["values"]["Female"]["n"]


def test_three_classes_have_rates_of_the_class_that_is_named():
    x, y, attributes = people()
    y = y + (x[:, 1] > 0.5)
    data = Federation.from_arrays(
        x, y, clients=[0, 1] * 240, attributes=attributes, class_names=["low", "middle", "high"]
    )
    without = trained(data).summary["results"]["global"]["seen"]["attributes"]["sex"]
    assert without["values"]["Male"]["selection_rate"] is None
    assert without["demographic_parity_difference"] is None
    assert without["score_difference"] is not None
    run = trained(data, evaluation=Evaluation(min_cell=1, positive="high"))
    found = run.summary["results"]["global"]["seen"]["attributes"]["sex"]
    samples = np.concatenate([data.test.of(client) for client in (0, 1)])
    predicted = predictions(run.model(), data, samples)
    rates, _ = by_hand(data.y[samples] == 2, predicted == 2, names_of(data, "sex", samples))
    assert found["values"]["Male"]["tpr"] == pytest.approx(rates["Male"]["tpr"], abs=1e-12)


def test_regression_has_the_loss_by_value():
    x, _, attributes = people()
    data = Federation.from_arrays(
        x, x[:, 0], clients=[0, 1] * 240, attributes=attributes, task="regression"
    )
    found = trained(data).summary["results"]["global"]["seen"]["attributes"]["sex"]
    assert found["worst"] == max(of["loss"] for of in found["values"].values())
    assert found["values"]["Male"]["selection_rate"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_cell": 0}, "evaluation.min_cell must be a whole number of at least 1, got 0"),
        ({"positive": 7}, "evaluation.positive must be a class from 0 to 1, got 7"),
        ({"positive": True}, "evaluation.positive must be a class, by number or name, got True"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        trained(evaluation=Evaluation(**settings))


def test_settings_in_a_file():
    made = experiment_from({"data": "digits", "evaluation": {"positive": 3, "min_cell": 8}})
    assert (made.evaluation.positive, made.evaluation.min_cell) == (3, 8)
    assert made.plain()["evaluation"]["min_cell"] == 8
    assert "min_cell" not in experiment_from({"data": "digits"}).plain()["evaluation"]
