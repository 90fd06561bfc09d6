"""Embeddings instead of images: those of the encoder, computed once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from equipoise import Federation
from equipoise.config import experiment_from, load_experiment
from equipoise.data import load
from equipoise.data.encode import encode_federation, encoded_samples
from equipoise.errors import InputError
from equipoise.models import pretrained
from tests.tiny_bert import write_bert
from tests.tiny_encoder import write_encoder


@pytest.fixture(autouse=True)
def entries(tmp_path, monkeypatch):
    """A cache directory for the test; return the arrays in it."""
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tmp_path / "cache"))
    return lambda: sorted((tmp_path / "cache" / "arrays").glob("*.npy"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def encoded_images(monkeypatch):
    """Return how many images encoders have processed since the last call."""
    make, seen = pretrained.encoder, []

    def watched(source):
        model = make(source)
        model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
        return model

    monkeypatch.setattr(pretrained, "encoder", watched)

    def since():
        passed = sum(seen)
        seen.clear()
        return passed

    return since


def pictures(channels=3, size=16, total=70, dtype=torch.uint8):
    """Two clients with more images than an encoder's batch size."""
    x = torch.randint(
        256, (total, channels, size, size), generator=torch.Generator().manual_seed(0)
    ).to(torch.uint8)
    x = x if dtype == torch.uint8 else x.to(dtype) / 255
    clients = np.repeat([0, 1], [total // 2, total - total // 2])
    return Federation.from_arrays(
        x, torch.arange(total) % 3, clients=clients, classes=3, name="pictures"
    )


def embedded(source, x):
    with torch.no_grad():
        return pretrained.encoder(source)(x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["bytes", "numbers"])
@pytest.mark.parametrize("channels", [1, 3])
def test_embeddings_are_those_of_the_encoder(source, channels, dtype):
    given = pictures(channels, dtype=dtype)
    made = encode_federation(given, source)
    assert (made.shape, made.x.dtype) == ((8,), torch.float32)
    torch.testing.assert_close(
        made.x, embedded(source, given.x.expand(-1, 3, -1, -1)), rtol=1e-5, atol=1e-5
    )
    assert made.x.std(0).min() > 1e-3
    assert torch.equal(made.y, given.y)
    for split in ("train", "val", "test"):
        assert np.array_equal(made.split(split).indices, given.split(split).indices)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=["bytes", "numbers"])
def test_images_are_resized_before(source, dtype):
    given = pictures(size=10, dtype=dtype)
    numbers = given.x.float() / (255 if dtype == torch.uint8 else 1)
    resized = F.interpolate(numbers, size=(16, 16), mode="bilinear", antialias=True)
    made = encode_federation(given, source, 16)
    torch.testing.assert_close(made.x, embedded(source, resized), rtol=1e-5, atol=1e-5)


def test_images_are_encoded_once(source, encoded_images, entries):
    first = encode_federation(pictures(), source)
    # The first image alone is part of the key.
    assert encoded_images() == 70 + 1
    assert torch.equal(encode_federation(pictures(), source).x, first.x)
    assert encoded_images() == 1
    assert len(entries()) == 1


def test_other_images_weights_and_sizes_are_encoded_anew(source, encoded_images, entries, tmp_path):
    encode_federation(pictures(), source)
    for number, other in enumerate(
        [
            (pictures(total=69), source),
            (pictures(), write_encoder(tmp_path / "other", seed=1)),
            (pictures(), source, 20),
        ]
    ):
        encoded_images()
        encode_federation(*other)
        assert encoded_images() == len(other[0].x) + 1
        assert len(entries()) == 2 + number


def test_a_damaged_entry_is_made_again(source, encoded_images, entries):
    wanted = encode_federation(pictures(), source).x
    (entry,) = entries()
    entry.write_bytes(entry.read_bytes()[:-200])
    encoded_images()
    assert torch.equal(encode_federation(pictures(), source).x, wanted)
    assert encoded_images() == 70 + 1


def test_encoders_that_differ_in_code_alone_are_told_apart():
    x = torch.arange(6.0).view(3, 2) + 1
    doubled, tripled = (
        encoded_samples(x, lambda block, n=n: n * block, ("times",), rows=2) for n in (2, 3)
    )
    assert torch.equal(doubled, 2 * x)
    assert torch.equal(tripled, 3 * x)


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_blocks_of_any_number_give_the_same(rows):
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    sizes = []

    def encode(block):
        sizes.append(len(block))
        return block.square()

    assert torch.equal(encoded_samples(x, encode, ("square", rows), rows), x.square())
    assert max(sizes) == min(rows, 7)


# ---- by name -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Write two domains of two classes in lossless files; return directory and images in order."""
    x = pictures(size=10, total=40).x
    for number, image in enumerate(x):
        domain, class_ = number // 20, number // 10 % 2
        path = tmp_path / "images" / "ab"[domain] / "xy"[class_] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return tmp_path / "images", x


def section(folder, source, **more):
    return {
        "name": "imagefolder",
        "root": str(folder[0]),
        "size": 10,
        "encode": source,
        "encode_size": 16,
        **more,
    }


def test_image_folders_may_be_encoded(source, folder, encoded_images):
    made = load(**section(folder, source))
    assert encoded_images() == 40 + 1
    plain = load(
        **{
            key: value
            for key, value in section(folder, source).items()
            if not key.startswith("encode")
        }
    )
    assert torch.equal(plain.x[:], folder[1])
    resized = F.interpolate(folder[1].float() / 255, size=(16, 16), mode="bilinear", antialias=True)
    torch.testing.assert_close(made.x, embedded(source, resized), rtol=1e-5, atol=1e-5)
    assert made.group_names == plain.group_names == ("a", "b")
    encoded_images()
    assert torch.equal(load(**section(folder, source)).x, made.x)
    assert encoded_images() == 1


def test_experiments_may_say_so(source, folder, tmp_path):
    experiment = experiment_from(
        {
            "data": section(folder, source),
            "model": "logistic",
            "training": {"rounds": 2, "batch_size": 8},
        }
    )
    run = experiment.run(out=tmp_path / "run")
    assert run.trainer.federation.shape == (8,)
    assert set(run.trainer.state.model) == {"head.weight", "head.bias"}
    assert run.trainer.state.model["head.weight"].shape == (2, 8)
    # The run's own configuration gives the same federation.
    again = load_experiment(tmp_path / "run" / "config.yaml")
    assert again.data["encode"] == source
    assert again.data["encode_size"] == 16
    assert again.federation().fingerprint() == run.trainer.federation.fingerprint()


def test_samples_that_are_no_images_are_refused(source):
    text = Federation.from_arrays(
        torch.zeros(4, 9).long(), [0, 1, 0, 1], clients=[0, 0, 1, 1], name="play"
    )
    with pytest.raises(
        InputError, match=r"data.encode needs images .* but samples of 'play' have shape \(9,\)"
    ):
        encode_federation(text, source)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode": "nowhere/at/all"}, "nowhere/at/all"),
        ({"encode_size": 0}, "data.encode_size must be .*, got 0"),
    ],
)
def test_what_cannot_be_encoded_is_refused(options, message, source):
    with pytest.raises(InputError, match=message):
        load("digits", **{"encode": source, **options})


def test_a_size_without_an_encoder_is_refused():
    with pytest.raises(InputError, match="data.encode_size=16 needs data.encode"):
        load("digits", encode_size=16)
    with pytest.raises(InputError, match=r"data\.encode_size=16 needs data\.encode"):
        experiment_from({"data": {"name": "digits", "encode_size": 16}}, "a.yaml").federation()


def texts(class_names=tuple("ab c")):
    x = torch.tensor([[0, 1, 3], [3, 2, 0], [1, 1, 1], [0, 0, 2]])
    return Federation.from_arrays(
        x, torch.tensor([0, 1, 2, 3]), clients=[0, 0, 1, 1], class_names=class_names
    )


def test_texts_are_encoded_as_the_paper_words_them(tmp_path, entries):
    source = write_bert(tmp_path / "bert")
    made = encode_federation(texts(), source)
    words = ["abc", "c a", "bbb", "aa "]
    wanted = pretrained.text_encoder(source)([f"The next character of {text}" for text in words])
    torch.testing.assert_close(made.x, wanted, rtol=1e-4, atol=1e-5)
    assert made.shape == (16,)
    again = encode_federation(texts(), source)
    assert torch.equal(again.x, made.x)
    assert len(entries()) == 1


def test_texts_need_their_characters(tmp_path):
    source = write_bert(tmp_path / "bert")
    with pytest.raises(InputError, match="or texts with class_names that are their characters"):
        encode_federation(texts(class_names=None), source)
    with pytest.raises(InputError, match="or texts with class_names that are their characters"):
        encode_federation(texts(class_names=("one", "two", "three", "four")), source)
    with pytest.raises(InputError, match="encode_size=8 cannot be used with text"):
        encode_federation(texts(), source, size=8)
