"""The cases of the fuzz tests: each suite draws one case and uses it as a user would."""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import shutil
import zipfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from equipoise import Federation, load
from equipoise.config import Override, experiment_from, read_yaml
from equipoise.data.cifar import cifar
from equipoise.data.columns import Columns, Number, Target, Text, read_columns
from equipoise.data.files import read_idx
from equipoise.data.leaf import read_leaf
from equipoise.data.silos import silos
from equipoise.data.table import table
from equipoise.report.reading import read_run
from equipoise.run.directory import read_config
from equipoise.study import study_from
from equipoise.study.runs import finished
from tests.data.small_files import cifar_batch, idx_bytes

Draw = Callable[[st.SearchStrategy[Any]], Any]

EXPERIMENT = {
    "method": {
        "name": "fedprox",
        "mu": 0.5,
        "sampling": {"name": "uniform"},
        "guard": {"name": "norm", "bound": 2.0},
    },
    "data": {
        "name": "digits",
        "imbalance": 2,
        "splits": [0.6, 0.2, 0.2],
        "partition": {"name": "iid", "clients": 3},
    },
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.1},
    "training": {
        "rounds": 2,
        "cohort": 0.5,
        "epochs": 1,
        "batch_size": 10,
        "clip": 1.0,
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": {"kind": "cosine", "floor": 0.1},
        "augment": [{"name": "flip"}],
    },
    "machine": {"device": "cpu", "precision": "float32", "chunk": "auto"},
    "evaluation": {
        "every": 1,
        "select": "best",
        "metrics": ["auroc"],
        "fine_tune": {"epochs": 1, "move": "head"},
    },
    "seed": 3,
    "checkpoint_every": 2,
    "flower": {"clients": 2, "privacy": {"clip": 1.0, "noise": 0.5}},
}
STUDY = {
    "base": {"data": "digits", "training": {"rounds": 1}},
    "methods": ["fedavg", {"name": "qffl", "grid": {"q": [0.1, 1.0]}, "label": "fair"}],
    "settings": {"even": {"data.imbalance": 1}, "uneven": {"data": {"imbalance": 20}}},
    "seeds": [0, 1],
    "metrics": ["mean", "worst10"],
}
NUMBERS = (0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, 1e-320, math.nan, math.inf)
TEXTS = ("", "x", "\x1b[2J", "1e999", "-1e5", "auto", "../..", "name", "x" * 5000)
ODD: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS, date(2001, 1, 1), b"x", ()])
    | st.integers()
    | st.floats()
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "lr", "kind", "x", 3, None]), inner, max_size=3)
    ),
    max_leaves=5,
)


def spoiled(draw: Draw, given: Any) -> Any:
    """Replace one nested value by an odd one, or add a key to a mapping."""
    if isinstance(given, dict) and given and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(given, key=str)))
        return {**given, key: spoiled(draw, given[key])}
    if isinstance(given, list) and given and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(given) - 1))
        return [*given[:place], spoiled(draw, given[place]), *given[place + 1 :]]
    if isinstance(given, dict) and draw(st.booleans()):
        return {**given, draw(st.text(max_size=5) | st.integers() | st.none()): draw(ODD)}
    return draw(ODD)


def damaged(draw: Draw, content: bytes) -> bytes:
    """Change, insert, drop or truncate bytes."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        piece = draw(
            st.binary(max_size=4)
            | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"9" * 40, b"[" * 60, b'"', b"{", b"-1"])
        )
        how = draw(st.sampled_from(["change", "insert", "drop", "cut"]))
        if how == "cut":
            content = content[:place]
        else:
            content = (
                content[:place]
                + (b"" if how == "drop" else piece)
                + content[place + (how != "insert") * len(piece) :]
            )
    return content


def configurations(draw: Draw, folder: Path) -> None:
    """Experiments and studies with odd values."""
    if draw(st.booleans()):
        experiment_from(spoiled(draw, EXPERIMENT), "a.yaml")
    else:
        study_from(spoiled(draw, STUDY), "a.yaml")


def overrides(draw: Draw, folder: Path) -> None:
    """Odd values on the command line."""
    keys = [
        "training.optimizer.lr",
        "method.mu",
        "data",
        "data.splits",
        "machine.device",
        "seed",
        "model.hidden",
        "x.y",
    ]
    value = draw(
        st.text(max_size=20)
        | ODD.map(str)
        | ODD.map(lambda odd: yaml.safe_dump(odd) if odd != () else "()")
    )
    experiment_from(
        {"data": "digits"}, "", [Override.parse(f"{draw(st.sampled_from(keys))}={value}")]
    )


def documents(draw: Draw, folder: Path) -> None:
    """Damaged experiment files."""
    path = folder / "a.yaml"
    path.write_bytes(damaged(draw, yaml.safe_dump(EXPERIMENT).encode()))
    experiment_from(read_yaml(path), str(path))


def arrays(draw: Draw, folder: Path) -> None:
    """Arrays of all types and shapes."""
    kinds = ["f4", ">f8", "f2", "i8", ">i2", "u1", "u8", "?", "c8", "U2", "S1", "O", "M8[D]", "g"]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    x = np.zeros([draw(st.integers(0, 12)), *shape], draw(st.sampled_from(kinds)))
    y: Any = draw(
        st.lists(
            st.integers(-2, 5) | st.floats() | st.sampled_from([10**9, None, True]), max_size=12
        )
    )
    y = (
        y
        if draw(st.booleans())
        else np.resize(np.arange(3), len(x)).astype(draw(st.sampled_from(kinds)), casting="unsafe")
    )
    ids: Any = draw(
        st.lists(st.sampled_from([0, 1, "a", "1", None, math.nan, (1,), "\n"]), max_size=12)
    )
    ids = ids if draw(st.booleans()) else [0, 1] * (len(x) // 2) + [0] * (len(x) % 2)
    options = {
        "classes": draw(st.sampled_from([None, None, 0, 1, 3, -1, 2**40, True, 2.5])),
        "splits": draw(
            st.sampled_from(
                [(0.6, 0.2, 0.2), (1, 0, 0), (0, 1, 0), (0.5, 0.5), (math.nan, 0, 1), "abc"]
            )
        ),
        "task": draw(st.sampled_from(["classification", "regression", "segmentation", "x"])),
        "unseen": draw(st.sampled_from([(), [0], "a", 3, [None]])),
        "groups": draw(st.sampled_from([None, {}, {0: "a", 1: "b"}, {0: "\x1b"}])),
    }
    Federation.from_arrays(x, y, clients=ids, **options)


def _npz(draw: Draw) -> bytes:
    buffer = io.BytesIO()
    kinds = ["f4", ">f8", "i8", "u1", "c8", "U2", "?"]
    rows = draw(st.integers(0, 4))
    written = {
        name: np.zeros([rows, *shape], draw(st.sampled_from(kinds)))
        for name, shape in (("x", [2]), ("y", []))
    }
    np.savez_compressed(buffer, **written) if draw(st.booleans()) else np.savez(buffer, **written)
    return buffer.getvalue()


def _zip_of_anything(draw: Draw) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in ("x.npy", "y.npy"):
            one = io.BytesIO()
            np.save(one, np.zeros(3))
            archive.writestr(name, damaged(draw, one.getvalue()))
    return buffer.getvalue()


def data_files(draw: Draw, folder: Path) -> None:
    """Damaged files of data."""
    kinds = ["npz", "zip", "about", "pickle", "idx", "gzip", "leaf", "csv", "columns"]
    kind = draw(st.sampled_from(kinds))
    path = folder / "file"
    if kind in ("npz", "zip", "about"):
        silo = folder / "silos" / "c1"
        silo.mkdir(parents=True, exist_ok=True)
        content = {"npz": lambda: damaged(draw, _npz(draw)), "zip": lambda: _zip_of_anything(draw)}
        (silo / "data.npz").write_bytes(content.get(kind, lambda: _npz(draw))())
        (silo / "client.yaml").write_bytes(
            damaged(draw, b"group: rural") if kind == "about" else b""
        )
        silos(root=str(silo.parent))
    elif kind == "pickle":
        home = folder / "cifar-10-batches-py"
        home.mkdir(exist_ok=True)
        batch = pickle.dumps(cifar_batch(10, 0, 1), protocol=draw(st.integers(0, 5)))
        (home / "test_batch").write_bytes(damaged(draw, batch))
        cifar(root=str(folder), portion="test")
    elif kind == "leaf":
        path.write_bytes(
            damaged(draw, b'{"users": ["ann"], "user_data": {"ann": {"x": ["to b"], "y": ["e"]}}}')
        )
        read_leaf([path])
    elif kind == "csv":
        path.write_bytes(damaged(draw, b"age,ward,y\n30,a,yes\n,b,no\n1e5,?,no\n"))
        table(file=str(path), y="y", clients=draw(st.sampled_from([None, "ward"])))
    elif kind == "columns":
        learned = Columns(
            (Number("age", 30.0, 5.0), Text("ward", ("a", "b"))),
            Target("y", "classification", ("no", "yes")),
        )
        content = learned.content()
        plain = json.dumps(spoiled(draw, json.loads(content)), default=str).encode()
        path.write_bytes(draw(st.sampled_from([plain, damaged(draw, content)])))
        read_columns(path).inputs([{"age": draw(ODD), "ward": draw(ODD)}])
    else:
        content = idx_bytes(np.zeros((2, 2, 2), np.uint8))
        path.write_bytes(damaged(draw, gzip.compress(content) if kind == "gzip" else content))
        read_idx(path)


def run_directories(draw: Draw, folder: Path) -> None:
    """Damaged files of a run of an older version, which has no checksums."""
    run = folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "run", run)
    (run / "SHA256SUMS").unlink()
    path = draw(st.sampled_from(sorted(run.iterdir())))
    if path.suffix == ".json" and draw(st.booleans()):
        path.write_text(json.dumps(spoiled(draw, json.loads(path.read_text())), default=str))
    elif path.name == "config.yaml" and draw(st.booleans()):
        path.write_text(
            yaml.safe_dump(spoiled(draw, yaml.safe_load(path.read_text()))).replace("()", "[]")
        )
    else:
        path.write_bytes(damaged(draw, path.read_bytes()))
    read_config(run)
    read_run(run)
    finished(run, "val")
    load(run)


SUITES = {
    suite.__name__: suite
    for suite in (configurations, overrides, documents, arrays, data_files, run_directories)
}
