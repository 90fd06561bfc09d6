"""What every model is: features, then a head, perhaps after a frozen stem."""

from __future__ import annotations

from torch import Tensor, nn

from equipoise.errors import InputError


class Model(nn.Module):
    """A network in named parts, so that methods can say which part moves, is shared or stays with the client.

    Methods may attach further parts with ``add_module``. ``forward`` does not call them.

    Parameters
    ----------
    features : nn.Module
        Maps a batch of inputs to a batch of vectors ``z`` (papers: extractor, body, representation).
    head : nn.Module
        Maps ``z`` to the outputs: one score a class, or the predicted values (papers: predictor, classifier).
    stem : nn.Module, optional
        The frozen beginning of the model. It must treat samples one by one and have no parameter with
        ``requires_grad``. The engine encodes the data with it once, and ``features`` gets the result.

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

    def __init__(self, features: nn.Module, head: nn.Module, *, stem: nn.Module | None = None) -> None:
        super().__init__()
        moving = [name for name, p in stem.named_parameters() if p.requires_grad] if stem is not None else []
        if moving:
            raise InputError(
                f"parameter {moving[0]!r} of the stem requires a gradient, but a stem never moves; valid: parameters with "
                "requires_grad=False, such as those of equipoise.models.frozen.Frozen(stem)"
            )
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
        encoded = x if self.stem is None else self.stem(x)
        output: Tensor = self.head(self.features(encoded))
        return output
