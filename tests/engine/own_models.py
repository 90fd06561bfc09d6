"""User-defined models: ordinary modules with all kinds of dropout, for images and texts."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn


class Convolving(nn.Module):
    """The network of PyTorch's first tutorials: functional dropout, and other names of layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.fc1 = nn.Linear(16, 8)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.dropout2d(x, 0.25, self.training)
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), p=0.5, training=self.training)
        return self.fc2(x)


class Reader(nn.Module):
    """A recurrent network that reads texts; its last state is classified."""

    def __init__(self, kind=nn.GRU, **options):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layers = kind(5, 6, num_layers=2, dropout=0.4, **options)
        self.first_axis = options.get("batch_first", False)
        self.classifier = nn.Linear(options.get("proj_size") or 6, 7)

    def forward(self, x):
        tokens = self.embedding(x)
        outputs, _ = self.layers(tokens if self.first_axis else tokens.transpose(0, 1))
        last = outputs[:, -1] if self.first_axis else outputs[-1]
        return self.classifier(last[:, : self.classifier.in_features])


class Encoder(nn.Module):
    """A transformer encoder with dropout in and after its attention."""

    def __init__(self, *, batch_first=True, causal=False):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(8, 7)
        self.batch_first, self.causal = batch_first, causal

    def forward(self, x):
        tokens = self.embedding(x)
        mask = (
            nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=tokens.dtype)
            if self.causal
            else None
        )
        tokens = tokens if self.batch_first else tokens.transpose(0, 1)
        made = self.encoder(tokens, mask=mask)
        return self.classifier((made if self.batch_first else made.transpose(0, 1)).mean(1))


class Attending(nn.Module):
    """Multi-head attention with all its options."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True, **options)
        self.classifier = nn.Linear(8, 7)

    def forward(self, x):
        tokens = self.embedding(x)
        made, weights = self.attention(tokens, tokens, tokens, key_padding_mask=x == 0)
        return self.classifier(made.mean(1)) + weights.mean()


def image_classifier(attention="sdpa", *, shape=(2, 5, 5), classes=4, patch=2):
    """A tiny ViT of Hugging Face."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=shape[1],
        patch_size=patch,
        num_channels=shape[0],
        num_labels=classes,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.3,
        attn_implementation=attention,
    )
    return transformers.ViTForImageClassification(config)


def text_classifier(attention="sdpa"):
    """A tiny BERT of Hugging Face for texts of nine characters and seven classes."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed: equipoise[pretrained]"
    )
    config = transformers.BertConfig(
        vocab_size=7,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=16,
        num_labels=7,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.3,
        attn_implementation=attention,
    )
    return transformers.BertForSequenceClassification(config)
