"""Samples encoded by a frozen model: computed once and stored in the cache directory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.checks import count
from equipoise.data.cache import MappedArray, cached
from equipoise.errors import InputError
from equipoise.federation import Federation
from equipoise.samples import Samples
from equipoise.tree import digest

# Increase this whenever the same key would give other values.
_VERSION = 1
# Batch size of an encoder.
_IMAGES = 64
NEXT_CHARACTER = "The next character of {}"
"""Client2Vec's text for a sample when the task is to predict the next character (appendix D.1)."""
# Encoded samples up to this size are held in memory.
_IN_MEMORY = 4 << 30


def encoded_samples(
    x: Tensor | Samples,
    encode: Callable[[Tensor], Tensor],
    key: tuple[object, ...],
    rows: int,
    about: str = "",
) -> Tensor | MappedArray:
    """Encode samples, or read the encoded samples from the cache directory.

    Parameters
    ----------
    x : Tensor or Samples
        The samples.
    encode : callable
        Encodes a block of samples; each row of its result depends on one sample alone.
    key : tuple
        Everything else that the result depends on, such as the hash of the encoder's weights. Its
        values must have the same ``repr`` in every process.
    rows : int
        How many samples to encode at a time.
    about : str
        What the result is, in one line; see :func:`equipoise.data.cache.cached`.

    Returns
    -------
    Tensor or MappedArray
        One row per sample: a tensor, or an array on disk if it is large.

    Examples
    --------
    >>> import os, tempfile
    >>> os.environ["EQUIPOISE_CACHE"] = tempfile.mkdtemp()
    >>> encoded_samples(torch.ones(3, 2), lambda block: 2 * block, ("doubled",), rows=2)
    tensor([[2., 2.],
            [2., 2.],
            [2., 2.]])
    >>> del os.environ["EQUIPOISE_CACHE"]
    """
    like = encode(x[:1]).cpu()
    # The first encoded sample is part of the key, because encoders may differ only in their code.
    known = samples_digest(x), *key, _VERSION, torch.__version__, digest({"first": like})

    def blocks() -> Iterator[Tensor]:
        for start in range(0, len(x), rows):
            yield encode(x[start : start + rows]).cpu()

    array = cached(
        hashlib.sha256(repr(known).encode()).hexdigest(),
        (len(x), *like.shape[1:]),
        like.dtype,
        blocks,
        about,
    )
    return array[:] if len(array) * like[0].nbytes <= _IN_MEMORY else array


def samples_digest(x: Tensor | Samples) -> str:
    """Return a hash of all samples.

    Examples
    --------
    >>> samples_digest(torch.zeros(2)) == samples_digest(torch.zeros(2))
    True
    """
    return digest({"x": x}) if isinstance(x, Tensor) else x.digest


def encode_federation(federation: Federation, source: str, size: int | None = None) -> Federation:
    """Replace the images or texts of a federation with embeddings.

    Parameters
    ----------
    federation : Federation
        Its samples are images with one or three channels, as bytes or as floating point numbers
        from 0 to 1; or texts as positions in ``class_names``, which must then be characters.
    source : str
        A pretrained image model: a directory or a name on the Hugging Face hub; see
        :func:`equipoise.models.pretrained.pretrained`. For texts, a text encoder, which gets
        "The next character of ..."; see :func:`equipoise.models.pretrained.text_encoder`.
    size : int, optional
        Height and width to which images are resized (bilinear) before they are encoded; by default
        they are not.

    Returns
    -------
    Federation
        With the same clients, whose samples are vectors in float32.

    Raises
    ------
    InputError
        If the samples are neither images nor texts, or the model is missing.
    """
    from equipoise.models.pretrained import encoder

    if size is not None:
        count(size, "data.encode_size")
    if len(federation.shape) == 1 and not federation.x.dtype.is_floating_point:
        return _encode_texts(federation, source, size)
    if len(federation.shape) != 3 or federation.shape[0] not in (1, 3):
        raise InputError(
            "data.encode needs images of shape (1 or 3, height, width), but samples of "
            f"{federation.name!r} have shape {federation.shape}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = encoder(source).to(device)

    @torch.no_grad()
    def encode(images: Tensor) -> Tensor:
        images = images.to(device).expand(-1, 3, -1, -1)
        if size is not None:
            # Bytes cannot be interpolated. Numbers from 0 to 1 have the same meaning.
            images = images.float() / (1 if images.is_floating_point() else 255)
            images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
        return cast(Tensor, model(images)).float()

    key = "encoder", model.digest, size, device.type
    about = f"samples of {federation.name} encoded by {source}"
    return replace(federation, x=encoded_samples(federation.x, encode, key, _IMAGES, about))


def _encode_texts(federation: Federation, source: str, size: int | None) -> Federation:
    from equipoise.models.pretrained import text_encoder

    characters = federation.class_names or ()
    if not characters or any(len(name) != 1 for name in characters):
        raise InputError(
            "data.encode needs images of shape (1 or 3, height, width), or texts with class_names "
            f"that are their characters, but samples of {federation.name!r} have shape "
            f"{federation.shape} and class_names {federation.class_names}"
        )
    if size is not None:
        raise InputError(f"data.encode_size={size!r} cannot be used with text, only with images")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = text_encoder(source).to(device)

    def encode(rows: Tensor) -> Tensor:
        texts = ("".join(characters[number] for number in row) for row in rows.tolist())
        return model([NEXT_CHARACTER.format(text) for text in texts]).float()

    key = "text encoder", model.digest, NEXT_CHARACTER, characters, device.type
    about = f"texts of {federation.name} encoded by {source}"
    return replace(federation, x=encoded_samples(federation.x, encode, key, _IMAGES, about))
