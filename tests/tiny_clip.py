"""A tiny CLIP on disk, with a tokenizer of letters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
WIDTH, TOKEN_WIDTH = 6, 8


def write_clip(folder, *, seed=1, longest=24, legacy=False, tokenizer=True, width=WIDTH):
    """Write a CLIP with random weights, for images of 16 x 16; return its directory.

    ``legacy`` writes the number of the end token that configurations had before transformers 4.31.
    """
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    vocabulary = _vocabulary()
    same = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_dropout": 0.3,
        "projection_dim": width,
    }
    text = {
        **same,
        "hidden_size": TOKEN_WIDTH,
        "intermediate_size": 12,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": longest,
        "bos_token_id": vocabulary["<|startoftext|>"],
        "eos_token_id": 2 if legacy else vocabulary["<|endoftext|>"],
        "pad_token_id": 1,
    }
    vision = {**same, "hidden_size": 8, "intermediate_size": 12, "image_size": 16, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=width)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.CLIPModel(config)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name != "logit_scale":
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    folder = Path(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": MEAN, "image_std": STD})
    )
    if tokenizer:
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("#version: 0.2\nc a\nca t</w>\n")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "CLIPTokenizer"})
        )
    return str(folder)


def _vocabulary():
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.-"
    pieces = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "ca",
        "cat</w>",
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    return {piece: number for number, piece in enumerate(pieces)}
