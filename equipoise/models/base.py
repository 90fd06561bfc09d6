"""What every model is: features, then a head."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """A network in two named parts, so that methods can say which part moves, is shared or stays with the client.

    Parameters
    ----------
    features : nn.Module
        Maps a batch of inputs to a batch of vectors ``z`` (papers: extractor, body, representation).
    head : nn.Module
        Maps ``z`` to the outputs: one score a class, or the predicted values (papers: predictor, classifier).

    Examples
    --------
    >>> import torch
    >>> model = Model(nn.Flatten(), nn.Linear(4, 3))
    >>> model(torch.zeros(5, 2, 2)).shape
    torch.Size([5, 3])
    >>> list(model.state_dict())
    ['head.weight', 'head.bias']
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Return ``head(features(x))``.

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
        output: Tensor = self.head(self.features(x))
        return output
