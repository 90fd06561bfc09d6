"""A tiny BERT on disk, with a tokenizer of letters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

WIDTH = 16


def write_bert(folder, *, seed=0, width=WIDTH, first_token=False):
    """Write a BERT with random weights like sentence-transformers; return its directory."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!"
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{letter}" for letter in letters),
    ]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.BertModel(config)
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    if first_token:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"pooling_mode_cls_token": True})
        )
    return str(folder)
