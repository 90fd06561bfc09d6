"""Client2Vec's experiments match the paper, and run on small replacements for their data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from equipoise.client_index import ClientIndex, make_index
from equipoise.config import Override
from equipoise.data import load
from equipoise.optimizers import optimizer_named
from equipoise.study import load_study
from tests.experiments.scripts import load_script
from tests.experiments.stand_ins import write_cifar, write_images, write_resnet, write_roles
from tests.tiny_bert import write_bert
from tests.tiny_clip import write_clip
from tests.tiny_encoder import write_encoder

HOME = Path(__file__).parents[2] / "experiments" / "client2vec"
HOSTS = ("fedavg", "fedavgm", "feddyn", "moon", "fedlc")
USES = {"i": 1, "i+ii": 2, "i+ii+iii": 3}
TABLES = (
    "figure4",
    "table1-cifar10",
    "table1-domainnet",
    "table1-pacs",
    "table1-shakespeare",
    "table2",
    "table4-8",
    "table5",
    "table6",
    "table7",
    "table9",
)
ON_CIFAR = ("figure4", "table1-cifar10", "table2", "table5", "table6", "table7", "table9")
# The stages that make indices, and how many clients they have on stand-ins.
STAGES = {"twoclasses": 100, "cifar10": 100, "domainnet": 60, "pacs": 40, "shakespeare": 8}
STAGE_OF = {name: "cifar10" for name in ON_CIFAR} | {
    "table1-domainnet": "domainnet",
    "table4-8": "domainnet",
    "table1-shakespeare": "shakespeare",
    "table9": "twoclasses",
    "table1-pacs": "pacs",
}
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
IN_SMALL = ["training.rounds=2", "training.epochs=1", "evaluation.every=2"]


def described(name):
    return yaml.safe_load((HOME / f"{name}.yaml").read_text())


def indices_of(name):
    """The files from which a study reads indices."""
    methods = (method for method in described(name)["methods"] if isinstance(method, dict))
    return {Path(method["index"]) for method in methods if "index" in method}


def write_indices(name, index):
    """Write an index wherever a study expects one."""
    for path in indices_of(name):
        path.parent.mkdir(parents=True, exist_ok=True)
        index.write(path)


def random_index(clients):
    draws = torch.Generator().manual_seed(0)
    return ClientIndex(
        np.arange(clients), *(torch.randn(clients, 16, generator=draws) for _ in range(2))
    )


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Read a study in a separate directory, with indices where it expects them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))

    def read(name, *, index=None, seeds=(1,), **how):
        write_indices(name, index or random_index(100))
        return load_study(HOME / f"{name}.yaml", seeds=list(seeds), **how)

    return read


def test_every_table_is_there():
    found = {path.stem for path in HOME.glob("*.yaml")}
    assert found == {*TABLES, *(f"index-{name}" for name in STAGES)}


@pytest.mark.parametrize("name", TABLES)
def test_training_is_the_papers(name, study):
    for job in study(name).jobs:
        training = job.experiment.training
        assert (training.rounds, training.epochs, training.cohort, training.optimizer.lr) == (
            100,
            5,
            0.1,
            1e-2,
        )
        assert training.clip == (10 if job.method.startswith("feddyn") else None)
        momentum = 0.9 if name in ("table1-domainnet", "table1-pacs", "table4-8") else 0.0
        assert (training.optimizer.momentum, training.optimizer.weight_decay) == (momentum, 5e-5)
        assert job.experiment.data["seed"] == (1 if name == "table1-pacs" else 0)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "table2"])
def test_hosts_inside_are_those_without_an_index(name, study):
    methods = {job.method: job.experiment.method for job in study(name).jobs}
    inside = {
        label: method.local.host for label, method in methods.items() if method.name == "client2vec"
    }
    assert inside
    for label, host in inside.items():
        assert host == methods[label.split()[0]]


@pytest.mark.parametrize("name", ["table1-cifar10", "table1-domainnet", "table1-shakespeare"])
def test_table_1_adds_one_use_after_the_other(name, study):
    methods = {job.method: job.experiment.method for job in study(name).jobs}
    hosts = (*HOSTS, "fediir") if name == "table1-domainnet" else HOSTS
    for host in hosts:
        for label, count in USES.items():
            wrapped = methods[
                f"{host} {label}" + ("" if name == "table1-cifar10" else " global")
            ].local
            assert (len(wrapped.uses), wrapped.tau, wrapped.weight) == (count, 1.0, 5.0)
    assert methods["fedavg i+ii+iii federated"].local.weight == 1.0


def test_tables_5_to_7_vary_one_thing(study):
    def varied(name, option):
        rules = {job.method: job.experiment.method.local for job in study(name).jobs}
        return {getattr(rule, option) for label, rule in rules.items() if label.startswith("moon ")}

    assert varied("table5", "tau") == {0.1, 0.5, 1.0, 2.0}
    assert varied("table7", "weight") == {1.0, 5.0, 10.0}
    assert {Path(path).parts[3] for path in varied("table6", "index")} == {
        f"{strategy}-{epochs}" for strategy in ("federated", "global") for epochs in (100, 500)
    }


def test_indices_are_made_of_the_clients_that_use_them():
    """A study and the stage of its index have the same data, except for encoding."""
    for name, stage in STAGE_OF.items():
        data, encoded = (described(file)["base"]["data"] for file in (name, f"index-{stage}"))
        if name == "table1-pacs":
            # Each seed of that stage has its own partition.
            path = described(name)["methods"][1]["index"]
            assert Path(path).parent.name == f"seed{data.pop('seed')}"
        assert {"encode", "standardize", "encode_size"} >= set(encoded) - set(data)
        assert data == {option: encoded[option] for option in data}


@pytest.mark.parametrize("name", STAGES)
def test_training_of_indices_is_as_long_as_the_names_of_methods_say(name, study):
    """FEDERATED has rounds of ten epochs with a tenth of the clients, and GLOBAL one round."""
    jobs = study(f"index-{name}").jobs
    assert len(jobs) == {"cifar10": 8, "pacs": 9}.get(name, 2)
    for job in jobs:
        training, method = job.experiment.training, job.experiment.method
        assert (training.cohort, training.batch_size) == (0.1, 128)
        assert training.optimizer == optimizer_named("adam", lr=1e-3)
        assert (method.local.name, job.experiment.model["name"]) == ("dsaign", "dsaign")
        whole = 100 if job.method.endswith("-100") else 500
        apart = job.method.startswith("federated")
        assert method.view.gathers != apart
        assert (training.rounds, training.epochs) == ((whole // 10, 10) if apart else (1, whole))


# ---- on stand-ins --------------------------------------------------------------------------------


def check(small, tmp_path, name="small"):
    results = small.run(tmp_path / "runs" / name)
    assert results.failures == {}
    assert len(results.summaries) == len(small.jobs)


def small_data(name, tmp_path):
    """Write a stand-in for the data of a stage, and return the overrides that make it be read."""
    match name:
        case "domainnet":
            classes = described("index-domainnet")["base"]["data"]["classes"][:4]
            root = write_images(tmp_path / name, DOMAINS, classes, each=12)
            return [f"data.root={root}", "data.size=16", f"data.classes=[{', '.join(classes)}]"]
        case "pacs":
            domains = ("art_painting", "cartoon", "photo", "sketch")
            root = write_images(tmp_path / name, domains, ("dog", "house"), each=24)
            return [f"data.root={root}", "data.size=16"]
        case "shakespeare":
            root = write_roles(tmp_path / name, STAGES[name], characters=1600)
            return [f"data.root={root}", "training.cohort=2"]
    return [f"data.root={write_cifar(tmp_path / name)}"]


@pytest.mark.parametrize("name", STAGES)
def test_stages_in_small_write_the_indices_that_tables_read(name, study, tmp_path):
    if name == "pacs":
        images, texts = write_encoder(tmp_path / "images", width=16), write_bert(tmp_path / "texts")
    else:
        images = texts = write_clip(tmp_path / "clip", width=16, longest=60)
    encoders = [f"data.encode={images}", f"model.text={texts}"]
    if "encode_size" in described(f"index-{name}")["base"]["data"]:
        encoders.append("data.encode_size=16")
    short = ["training.rounds=1", "training.epochs=1", "evaluation.every=1"]
    small = ["model.feedforward=8", "model.depth=1"]
    overrides = [*small_data(name, tmp_path), *encoders, *short, *small]
    check(study(f"index-{name}", overrides=overrides), tmp_path, f"index-{name}")
    written = {path.relative_to(tmp_path) for path in tmp_path.glob("runs/**/client_index.*")}
    for path in written:
        index = ClientIndex.read(path)
        assert index.ids.tolist() == list(range(STAGES[name]))
        assert index.features.shape == index.labels.shape == (STAGES[name], 16)
    read = {
        path for table, stage in STAGE_OF.items() if stage == name for path in indices_of(table)
    }
    own = {path for path in read if path.parts[1] != "client2vec-indices"}
    assert own
    assert own <= written


@pytest.mark.parametrize("name", ON_CIFAR)
def test_cifar_in_small(name, study, tmp_path):
    data = {"name": "digits", "seed": 0, "imbalance": 1.0}
    data |= {
        option: value
        for option, value in described(name)["base"]["data"].items()
        if option == "partition"
    }
    index = make_index(load(**data), lambda x, y: (x.flatten(1), torch.eye(10)[y]))
    overrides = [
        *IN_SMALL,
        "data.name=digits",
        "data.imbalance=1.0",
        "model.name=mlp",
        "training.cohort=0.2",
    ]
    # The other hosts are those of table 1.
    methods = [
        m["label"]
        for m in described(name)["methods"]
        if isinstance(m, dict) and m.get("host") == "fedavg"
    ]
    small = study(
        name,
        index=index,
        overrides=overrides,
        methods=None if name == "table1-cifar10" else methods,
    )
    check(small, tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "methods", "more"),
    [
        ("table1-domainnet", None, ["fediir", "fediir i+ii+iii federated", "moon i global"], []),
        (
            "table4-8",
            ["cct"],
            ["fedavg", "feddyn i+ii+iii global"],
            ["model.depth=1", "model.width=16", "model.heads=2"],
        ),
    ],
)
def test_domainnet_in_small(name, settings, methods, more, study, tmp_path):
    overrides = [*IN_SMALL, *small_data("domainnet", tmp_path), *more]
    if not more:
        overrides.append(f"model.source={write_resnet(tmp_path / 'resnet')}")
    small = study(
        name, index=random_index(60), overrides=overrides, settings=settings, methods=methods
    )
    check(small, tmp_path)


def test_pacs_in_small(study, tmp_path):
    source = write_resnet(tmp_path / "resnet")
    overrides = [*IN_SMALL, *small_data("pacs", tmp_path), f"model.source={source}"]
    small = study(
        "table1-pacs",
        index=random_index(40),
        overrides=overrides,
        methods=["fediir i+ii+iii"],
    )
    check(small, tmp_path)


def test_shakespeare_in_small(study, tmp_path):
    data = small_data("shakespeare", tmp_path)
    overrides = [*IN_SMALL, *data, "model.hidden=4", "model.layers=1"]
    methods = ["fedavg", "fedlc i+ii+iii global"]
    check(
        study("table1-shakespeare", index=random_index(8), overrides=overrides, methods=methods),
        tmp_path,
    )


def test_other_indices_are_written_for_all_clients(tmp_path):
    """A stage on digits, whose pixels are the embeddings."""
    from equipoise import train

    stage = {"name": "fedavg", "local": "dsaign"}
    digits = {"name": "digits", "seed": 0}
    how = {"rounds": 1, "model": {"name": "dsaign", "feedforward": 8, "depth": 1}}
    train(load(**digits), method=stage, data=digits, out=tmp_path / "stage", **how)
    overrides = ["data.name=digits", "model.name=logistic", "training.epochs=1"]
    script = load_script(HOME / "other_indices.py")
    paths = script.make(
        tmp_path / "stage", tmp_path / "out", [Override.parse(text) for text in overrides]
    )
    found = {path.stem: ClientIndex.read(path) for path in paths}
    assert {name: index.width for name, index in found.items()} == {
        "feature-average": 64,
        "class-prototypes": 640,
        "head-weights": 650,
    }
    assert all(len(index.ids) == 22 for index in found.values())
    expected = {
        Path(m["index"]).stem
        for m in described("table2")["methods"]
        if "client2vec-indices" in str(m)
    }
    assert set(found) == expected


def write_run(folder, scores, seconds):
    """Write the files of a run with two clients that times.py reads."""
    folder.mkdir(parents=True)
    rows = [
        {"round": r, "model": "global", "split": "test", "unseen": False, "accuracy": value + shift}
        for r, value in scores.items()
        for shift in (-0.1, 0.1)
    ]
    rows += [{**row, "split": "val", "accuracy": 1.0} for row in rows]
    laps = [
        {"round": r, "train": value, "combine": 1.0, "evaluate": 99.0}
        for r, value in seconds.items()
    ]
    for name, lines in (("metrics", rows), ("timings", laps)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps({"score": "accuracy"}))
    return folder


def test_times_by_hand(tmp_path, capsys, monkeypatch):
    """The host's best is 0.5 in round 4; the second run reaches it in round 2, the third never."""
    script, took = load_script(HOME / "times.py"), {1: 10.0, 2: 20.0, 3: 30.0, 4: 40.0}
    host = write_run(tmp_path / "fedavg" / "seed1", {2: 0.4, 4: 0.5}, took)
    fast = write_run(tmp_path / "all" / "seed1", {2: 0.5, 4: 0.7}, took)
    slow = write_run(tmp_path / "slow" / "seed1", {2: 0.1, 4: 0.2}, took)
    index = write_run(tmp_path / "global-500" / "seed1", {1: 0.0}, {1: 6.0})
    found = script.times([host, fast, slow], index)
    assert found["fedavg"] == script.Times(index=0.0, training=104.0, reached=4, until=104.0)
    assert (found["all"].index, found["all"].until, found["all"].total) == (7.0, 32.0, 39.0)
    assert (found["slow"].reached, found["slow"].total) == (None, None)
    assert script.times([host, slow], index, "val")["slow"].reached == 2
    monkeypatch.setattr(
        "sys.argv", ["times.py", "--index", str(index), str(host), str(fast), str(slow)]
    )
    script.main()
    assert capsys.readouterr().out.splitlines()[2].split() == ["all", "7", "104", "2", "32", "39"]
