"""What Flower's mods do to an update before it leaves a client."""

from __future__ import annotations

import math

import pytest
import torch

from equipoise.config import experiment_from, load_experiment
from equipoise.errors import InputError
from equipoise.flower.client import protected
from equipoise.flower.settings import Privacy
from equipoise.flower.wire import from_record
from tests.flower.loop import own_nodes, run_on_loop, write_experiment, write_silos


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("privacy")
    write_silos(folder / "silos")
    return folder


def norm(tree):
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tree.values()))


def test_a_long_update_is_shortened_and_keeps_its_direction():
    received = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[2.0]])}
    update = {
        "a": torch.tensor([4.0, 5.0]),
        "b": torch.tensor([[14.0]]),
    }  # differences 3, 4 and 12: norm 13
    made = protected(update, received, Privacy(clip=6.5))
    assert torch.allclose(made["a"], torch.tensor([2.5, 3.0]))
    assert torch.allclose(made["b"], torch.tensor([[8.0]]))


def test_a_short_update_is_left_alone():
    received, update = {"a": torch.zeros(3)}, {"a": torch.tensor([0.3, 0.0, 0.4])}
    assert torch.allclose(protected(update, received, Privacy(clip=1.0))["a"], update["a"])


def test_noise_has_the_deviation_the_budget_asks_for():
    received, update = {"a": torch.zeros(200_000)}, {"a": torch.ones(200_000)}
    privacy = Privacy(clip=0.5, epsilon=2.0, delta=1e-3)
    expected = 0.5 * math.sqrt(2 * math.log(1.25 / 1e-3)) / 2.0
    made = protected(update, received, privacy)["a"]
    clipped = 0.5 / math.sqrt(200_000)
    assert privacy.noise == pytest.approx(expected)
    assert float(made.std()) == pytest.approx(expected, rel=0.02)
    assert float(made.mean()) == pytest.approx(clipped, abs=5 * expected / math.sqrt(200_000))
    assert not torch.equal(made, protected(update, received, privacy)["a"])


def updates_sent(path, folder):
    """Run an experiment; return the differences between sent and received parameters."""
    sent = []

    def watch(node, message, reply):
        if message.metadata.message_type == "train":
            received = from_record(message.content.array_records["model"])
            update = from_record(reply.content.array_records["update"])
            sent.append({name: update[name] - received[name] for name in update})
        return reply

    run, _ = run_on_loop(path, own_nodes(folder), tamper=watch)
    return run, sent


def test_clipping_is_switched_on_in_the_experiment(folder):
    plain = write_experiment(folder, training={"rounds": 2, "optimizer": {"lr": 0.5}})
    _, free = updates_sent(plain, folder)
    assert min(map(norm, free)) > 0.05
    path = write_experiment(
        folder, training={"rounds": 2, "optimizer": {"lr": 0.5}}, flower={"privacy": {"clip": 0.05}}
    )
    run, clipped = updates_sent(path, folder)
    assert all(norm(update) == pytest.approx(0.05, rel=1e-6) for update in clipped)
    assert run.summary["rounds"] == 2


def test_noise_is_switched_on_in_the_experiment(folder):
    flower = {"privacy": {"clip": 0.1, "epsilon": 50.0, "delta": 1e-5}}
    path = write_experiment(folder, training={"rounds": 1}, flower=flower)
    noise = load_experiment(path).flower.privacy.noise
    _, sent = updates_sent(path, folder)
    numbers = torch.cat([tensor.flatten() for update in sent for tensor in update.values()])
    assert float(numbers.std()) == pytest.approx(noise, rel=0.05)


def test_what_would_leave_unprotected_is_refused(folder):
    flower = {"privacy": {"clip": 1.0}}
    path = write_experiment(folder, method="scaffold", flower=flower)
    with pytest.raises(
        InputError, match="protects parameters, but Scaffold also uploads control_change"
    ):
        run_on_loop(path, own_nodes(folder))
    path = write_experiment(folder, method="fedgr", flower=flower)
    with pytest.raises(
        InputError,
        match="protects parameters, but method 'fedgr' also asks clients for 'class_tokens'",
    ):
        run_on_loop(path, own_nodes(folder))
    path = write_experiment(
        folder, model={"name": "resnet18", "width": 4, "norm": "batch"}, flower=flower
    )
    with pytest.raises(
        InputError, match="noise on the statistics of BatchNorm; choose a model with GroupNorm"
    ):
        run_on_loop(path, own_nodes(folder))


def test_parts_that_clients_keep_are_not_asked_for(folder):
    path = write_experiment(
        folder,
        method="fedper",
        evaluation={"average_kept": True},
        flower={"privacy": {"clip": 1.0}},
    )
    with pytest.raises(
        InputError, match="average_kept asks clients for parts of the model without the protection"
    ):
        run_on_loop(path, own_nodes(folder))


def test_nothing_is_sent_and_nothing_protected_when_clients_train_alone(folder):
    path = write_experiment(
        folder, method="local", training={"rounds": 1}, flower={"privacy": {"clip": 1.0}}
    )
    run, sent = updates_sent(path, folder)
    assert sent == [{}] * 4
    assert run.summary["rounds"] == 1


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({}, "flower.privacy needs clip"),
        ({"clip": 0}, "flower.privacy.clip must be above 0 and finite, got 0"),
        ({"clip": 1.0, "epsilon": -1.0}, "flower.privacy.epsilon must be above 0"),
        ({"clip": 1.0, "delta": 1.0}, "flower.privacy.delta must be between 0 and 1"),
        (
            {"clip": 1.0, "epsilonn": 1.0},
            "unknown key 'flower.privacy.epsilonn'.*did you mean 'flower.privacy.epsilon'",
        ),
    ],
)
def test_settings_are_checked(privacy, says):
    with pytest.raises(InputError, match=says):
        experiment_from({"data": "digits", "flower": {"privacy": privacy}})


def test_an_experiment_says_its_flower_settings_again():
    content = {"data": "digits", "flower": {"clients": 5, "privacy": {"clip": 2.0}}}
    made = experiment_from(content)
    assert experiment_from(made.plain()).flower == made.flower
    assert "flower" not in experiment_from({"data": "digits"}).plain()
    assert isinstance(made.flower.privacy, Privacy)


def test_mods_see_one_record_as_flower_wants():
    """Flower's mods refuse messages of another form; this test detects a change of that."""
    with pytest.raises(Exception, match="keys in the ArrayRecord|could not be protected"):
        protected({"a": torch.ones(1)}, {"b": torch.ones(1)}, Privacy(clip=1.0))
