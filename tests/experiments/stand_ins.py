"""Small replacements for data and weights of experiments that are not part of the project."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch


def write_images(root, domains, classes, *, each=5, size=16):
    """Write random images to ``root/domain/class``; return the directory."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: equipoise[images]")
    draws = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            folder = Path(root, domain, name)
            folder.mkdir(parents=True)
            for number in range(each):
                pixels = draws.integers(0, 256, (size, size, 3), dtype=np.uint8)
                image.fromarray(pixels).save(folder / f"{number}.png")
    return str(root)


def write_resnet(folder, *, seed=0):
    """Write a ResNet with random weights, as transformers does; return its directory."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], layer_type="basic"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.ResNetModel(config)
    model.save_pretrained(folder)
    return str(folder)


def write_volumes(root, sites, *, each=5, size=16, slices=2):
    """Write NIfTI volumes of noise with square masks to ``root/site``; return the directory."""
    nibabel = pytest.importorskip("nibabel", reason="nibabel is not installed: equipoise[medical]")
    draws = np.random.default_rng(0)
    for site in sites:
        folder = Path(root, site)
        folder.mkdir(parents=True)
        for number in range(each):
            volume = draws.normal(size=(size, size, slices)).astype(np.float32)
            mask = np.zeros((size, size, slices), np.uint8)
            mask[4:10, 4:10] = 1
            for name, values in (
                (f"Case{number:02}", volume),
                (f"Case{number:02}_segmentation", mask),
            ):
                nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{name}.nii.gz")
    return str(root)


def write_roles(folder, roles, *, characters=120):
    """Write ``roles.jsonl`` with roles that repeat the same letters; return the directory."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "play": "Play",
                "role": f"Role {number}",
                "gender": "unknown",
                "text": "to be or not " * (characters // 13 + 1),
            }
        )
        for number in range(roles)
    ]
    Path(folder, "roles.jsonl").write_text("\n".join(lines))
    return str(folder)


def write_cifar(root, *, each=40, test=10):
    """Write noise in the format of CIFAR-10, with equal classes; return the directory."""
    draws, folder = np.random.default_rng(0), Path(root, "cifar-10-batches-py")
    folder.mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        count = test if name == "test_batch" else 10 * each // 5
        pixels = draws.integers(0, 256, (count, 3072), dtype=np.uint8)
        batch = {b"labels": [number % 10 for number in range(count)], b"data": pixels}
        (folder / name).write_bytes(pickle.dumps(batch))
    return str(root)
