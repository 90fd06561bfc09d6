"""Text encoders from disk against transformers, and their label vectors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from equipoise.engine.slots import frozen_digest
from equipoise.errors import InputError
from equipoise.models import build, with_class_names
from equipoise.models.dsaign import CHARACTER, label_texts
from equipoise.models.pretrained import text_encoder
from tests.tiny_bert import write_bert
from tests.tiny_clip import write_clip
from tests.tiny_encoder import write_encoder

TEXTS = ["a cat", "a photo of an apple", "b"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


@torch.no_grad()
def alone(source, kind, text):
    """The output of a model of transformers for one text, without padding."""
    transformers = pytest.importorskip("transformers")
    tokens = transformers.AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")
    return (
        getattr(transformers, kind)
        .from_pretrained(source)
        .eval()(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    )


def test_bert_is_averaged_over_the_tokens_of_each_text(bert):
    encoder = text_encoder(bert)
    wanted = torch.cat([alone(bert, "BertModel", text).last_hidden_state.mean(1) for text in TEXTS])
    torch.testing.assert_close(encoder(TEXTS), wanted, rtol=1e-4, atol=1e-5)
    assert encoder.width == wanted.shape[1]


def test_bert_may_be_read_out_at_its_first_token(tmp_path, bert):
    source = write_bert(tmp_path, first_token=True)
    encoder = text_encoder(source)
    wanted = torch.cat([alone(source, "BertModel", text).last_hidden_state[:, 0] for text in TEXTS])
    torch.testing.assert_close(encoder(TEXTS), wanted, rtol=1e-4, atol=1e-5)
    assert encoder.digest != text_encoder(bert).digest


def test_clip_texts_are_projected(clip):
    wanted = torch.cat(
        [alone(clip, "CLIPTextModelWithProjection", text).text_embeds for text in TEXTS]
    )
    torch.testing.assert_close(text_encoder(clip)(TEXTS), wanted, rtol=1e-4, atol=1e-5)


def test_many_and_long_texts(bert):
    encoder = text_encoder(bert)
    many = [f"{number}" for number in range(70)] + ["a" * 300]
    made = encoder(many)
    assert made.shape == (71, 16)
    torch.testing.assert_close(made[69], encoder(["69"])[0], rtol=1e-4, atol=1e-5)


def test_image_models_are_no_text_encoders(tmp_path):
    with pytest.raises(
        InputError, match="unknown model type 'vit' in config.json of source .* of a text encoder"
    ):
        text_encoder(write_encoder(tmp_path))


def test_texts_of_labels():
    assert label_texts(("owl", "top_hat", "Ant"), 3) == [
        "A photo of an owl",
        "A photo of a top hat",
        "A photo of an Ant",
    ]
    assert label_texts(("unicorn", "umbrella", "hourglass"), 3, "a/an {}") == [
        "a unicorn",
        "an umbrella",
        "an hourglass",
    ]
    assert label_texts(tuple("a\n _"), 4, CHARACTER) == [
        f"Character {name}" for name in ("a", "newline", "space", "_")
    ]


def test_label_vectors_are_embeddings_of_the_texts(bert):
    named = with_class_names({"name": "dsaign", "text": bert, "feedforward": 8}, ["cat", "owl"])
    model = build(shape=(16,), classes=2, **named)
    vectors = text_encoder(bert)(["A photo of a cat", "A photo of an owl"])
    torch.testing.assert_close(model.head.vectors, vectors, rtol=1e-4, atol=1e-5)
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    wanted = torch.stack(
        [F.cosine_similarity(model.features(x)[:, :16], v.expand(5, -1)) for v in vectors], 1
    )
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert model.double().head.vectors.dtype == torch.float64
    other = build(shape=(16,), classes=2, **{**named, "class_names": ["cat", "dog"]})
    assert frozen_digest(model) != frozen_digest(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_names": ["cat"]}, "class_names of model 'dsaign' must be 2 names"),
        ({}, "needs the names of the 2 classes for the option text"),
        (
            {"class_names": ["cat", "owl"], "template": "a"},
            "template of model 'dsaign' must be text with one {}",
        ),
        ({"class_names": ["cat", "owl"], "labels": "file"}, "set only one of them"),
    ],
)
def test_refusals(bert, options, message):
    with pytest.raises(InputError, match=message):
        build("dsaign", shape=(16,), classes=2, text=bert, **options)


def test_encoders_of_two_widths_are_refused(bert):
    with pytest.raises(
        InputError, match="has embeddings of size 16, but those of samples have size 32"
    ):
        build("dsaign", shape=(32,), classes=2, text=bert, class_names=["cat", "owl"])
