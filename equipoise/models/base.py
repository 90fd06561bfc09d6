"""The base class of models: features and a head, optionally after a frozen stem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.errors import NAME_THE_HEAD, InputError
from equipoise.samples import Samples


class Model(nn.Module):
    """A network with named parts, features and head, which methods can treat differently.

    Methods define which parts are trained, shared or kept by the client. They may attach further
    parts with ``add_module``. ``forward`` does not call these, with one exception: ``inputs``, a
    module that is applied to samples first. Samples are then not encoded in advance.

    Attributes
    ----------
    aligned_rows : {"samples", "classes"}
        What the rows of :meth:`aligned` are. Padding is ignored among samples; classes have none.

    Parameters
    ----------
    features : nn.Module
        Maps a batch of inputs to a batch of vectors ``z`` (papers: extractor, body,
        representation).
    head : nn.Module
        Maps ``z`` to the outputs: one score per class, or the predicted values (papers: predictor,
        classifier).
    stem : nn.Module, optional
        The frozen first part of the model. It must treat samples independently and have no
        parameter with ``requires_grad``. The engine encodes the data with it once, and passes the
        result to ``features``.

    Raises
    ------
    InputError
        If a parameter of the stem requires a gradient.

    Examples
    --------
    >>> import torch
    >>> model = Model(nn.Flatten(), nn.Linear(4, 3))
    >>> model(torch.zeros(5, 2, 2)).shape
    torch.Size([5, 3])
    >>> list(model.state_dict())
    ['head.weight', 'head.bias']
    """

    aligned_rows: ClassVar[str] = "samples"

    def __init__(
        self, features: nn.Module, head: nn.Module, *, stem: nn.Module | None = None
    ) -> None:
        super().__init__()
        moving = (
            [name for name, p in stem.named_parameters() if p.requires_grad]
            if stem is not None
            else []
        )
        if moving:
            raise InputError(
                f"parameter {moving[0]!r} of the stem requires a gradient, but a stem is never "
                "trained; valid: parameters with requires_grad=False, such as those of "
                "equipoise.models.frozen.Frozen(stem)"
            )
        self.inputs: nn.Module | None = None
        self.stem = stem
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return ``head(features(x))``, or ``head(features(stem(x)))`` if there is a stem.

        Parameters
        ----------
        x : Tensor
            A batch of inputs, samples first.

        Returns
        -------
        Tensor
            A batch of outputs, ``[samples, classes]``.

        Examples
        --------
        >>> import torch
        >>> model = Model(nn.Flatten(), nn.Identity())
        >>> model(torch.ones(1, 2, 2))
        tensor([[1., 1., 1., 1.]])
        """
        for first in (self.inputs, self.stem):
            x = x if first is None else first(x)
        output: Tensor = self.head(self.features(x))
        return output

    def check_samples(self, x: Tensor | Samples) -> None:
        """Refuse samples that the model would misread; by default none.

        It is called once before training, with all samples, because a check of values in every step
        would make a GPU wait.

        Parameters
        ----------
        x : Tensor or Samples
            All samples.

        Raises
        ------
        InputError
            If a sample is not valid.

        Examples
        --------
        >>> import torch
        >>> Model(nn.Flatten(), nn.Linear(4, 3)).check_samples(torch.zeros(5, 2, 2))
        """

    def aligned(self, z: Tensor) -> Tensor:
        """Return the values that methods such as BGP align between two models; by default pooled z.

        Override this to align other values. For example, a model with learned text prompts returns
        its text features, one row per class, and sets ``aligned_rows = "classes"``.

        Parameters
        ----------
        z : Tensor
            The output of ``features`` for a batch.

        Returns
        -------
        Tensor
            ``[rows, d]``.

        Examples
        --------
        >>> import torch
        >>> Model(nn.Identity(), nn.Flatten()).aligned(torch.ones(5, 3, 2, 2)).shape
        torch.Size([5, 3])
        """
        return pooled(z)


def pooled(z: Tensor) -> Tensor:
    """Return one vector per sample: z itself, or the mean of a feature map over its positions.

    Examples
    --------
    >>> pooled(torch.arange(8.0).view(1, 2, 2, 2))
    tensor([[1.5000, 5.5000]])
    """
    return z.flatten(2).mean(2) if z.dim() > 2 else z.reshape(len(z), -1)


def pixels(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return images as floating point numbers; integers from 0 to 255 are scaled to [0, 1].

    Parameters
    ----------
    x : Tensor
        Images.
    dtype : torch.dtype, optional
        The type of the result if the images are integers; by default PyTorch's default type.

    Returns
    -------
    Tensor
        Of the same shape.

    Examples
    --------
    >>> pixels(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return x if x.is_floating_point() else x.to(dtype or torch.get_default_dtype()) / 255


@torch.no_grad()
def width_of(model: nn.Module, shape: Sequence[int]) -> int:
    """Return the size of z, the output of a model's features for one sample.

    Parameters
    ----------
    model : nn.Module
        A model with ``features`` and optionally a ``stem``.
    shape : sequence of int
        The shape of one sample.

    Returns
    -------
    int
        The size of z.

    Examples
    --------
    >>> width_of(Model(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), nn.Linear(3, 2)), (2, 2))
    3
    """
    training = model.training
    model.eval()
    dtypes = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    x = torch.zeros(1, *shape, dtype=next(dtypes, None))
    # Models for text take integers; all others take floating point numbers.
    embeds = any(isinstance(layer, nn.Embedding) for layer in model.modules())
    stem = getattr(model, "stem", None) or nn.Identity()
    features: Any = getattr(model, "features", None)
    if not isinstance(features, nn.Module):
        raise InputError(
            f"the method needs a model with features and a head, but {type(model).__name__} does "
            f"not have them; valid: {NAME_THE_HEAD}"
        )
    z: Tensor = features(stem(x.long() if embeds else x))
    model.train(training)
    return z[0].numel()


@torch.no_grad()
def outputs_of(model: nn.Module, width: int) -> int:
    """Return the number of outputs of a model's head.

    Parameters
    ----------
    model : nn.Module
        A model with ``head``.
    width : int
        The size of z.

    Returns
    -------
    int
        The number of outputs.

    Examples
    --------
    >>> outputs_of(Model(nn.Flatten(), nn.Linear(3, 2)), 3)
    2
    """
    training, like = model.training, next(model.parameters())
    head: nn.Module = model.eval().head  # type: ignore[assignment]
    outputs = head(torch.zeros(1, width, dtype=like.dtype)).shape[-1]
    model.train(training)
    return int(outputs)
