"""A tiny pretrained image model on disk."""

from __future__ import annotations

import pytest
import torch


def write_encoder(folder, seed=0, width=8):
    """Write a vision transformer with random weights, for 16 x 16 images; return its directory."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    config = transformers.ViTConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=width,
        patch_size=4,
        intermediate_size=12,
        image_size=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.ViTModel(config, add_pooling_layer=False)
        for tensor in model.state_dict().values():
            tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return str(folder)
