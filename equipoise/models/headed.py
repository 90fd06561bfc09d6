"""Any module, divided into features and head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import InputError, unknown
from equipoise.models.base import Model


def with_head(module: nn.Module, head: str) -> Headed:
    """Divide a module into features and a head, for methods that treat the two differently.

    Everything outside the named layer is ``features``, and the layer is ``head``. The module itself
    is used, not a copy.

    Parameters
    ----------
    module : nn.Module
        Any model, such as a ``ViTForImageClassification`` of Hugging Face.
    head : str
        The dotted name of the layer that is the head, such as ``"classifier"``. Methods that use z
        need a module that calls this layer once, with one tensor, and returns its output.

    Returns
    -------
    Headed
        A model with the same outputs as the module.

    Raises
    ------
    InputError
        If there is no such layer, or if it is the whole module.

    Examples
    --------
    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> model = with_head(net, "3")
    >>> list(model.state_dict())
    ['features.body.1.weight', 'features.body.1.bias', 'head.weight', 'head.bias']
    >>> model.features(torch.zeros(5, 2, 2)).shape, model(torch.zeros(5, 2, 2)).shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"a head belongs to an nn.Module, got {module!r}")
    if not isinstance(head, str) or not head:
        raise InputError(
            f"head must be the name of a layer of the model, such as 'classifier', got {head!r}"
        )
    layers = [name for name, _ in module.named_modules() if name]
    if head not in layers:
        raise unknown("head", head, layers, where=f"the model {type(module).__name__}")
    return Headed(module, head)


def refuse_bytes(module: nn.Module, x: Tensor) -> None:
    """Refuse images as bytes for a model of Hugging Face, which would use them without scaling.

    Parameters
    ----------
    module : nn.Module
        A model, perhaps divided into features and head.
    x : Tensor
        A batch of samples.

    Raises
    ------
    InputError
        If ``x`` holds bytes, and the first module that gets them is an image model of Hugging Face.

    Examples
    --------
    >>> import torch
    >>> refuse_bytes(nn.Flatten(), torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    """
    first: Any = module.features.body if isinstance(module, Headed) else module
    if x.dtype == torch.uint8 and getattr(first, "main_input_name", None) == "pixel_values":
        name = type(first).__name__
        raise InputError(
            f"x holds bytes from 0 to 255, but {name} does not scale its images; valid: "
            "nn.Sequential(Normalise(mean, std), model) with Normalise of "
            "equipoise.models.pretrained_backbones, and '1.' before the name of the head; or "
            "numbers that are already scaled as in its preprocessor_config.json"
        )


class Headed(Model):
    """A module of any class, divided into features and head; see :func:`with_head`.

    Parameters
    ----------
    module : nn.Module
        The model. Its head is removed from it.
    head : str
        The dotted name of its head.

    Examples
    --------
    >>> Headed(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "1").head
    Linear(in_features=4, out_features=3, bias=True)
    """

    def __init__(self, module: nn.Module, head: str) -> None:
        part = module.get_submodule(head)
        super().__init__(Body(module, head), part)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the whole module, which may process the output of its head."""
        features: Any = self.features
        output: Tensor = features.through(self.head, x if self.inputs is None else self.inputs(x))
        return output

    def whole(self) -> nn.Module:
        """Put the head back and return the original module with its current tensors.

        Examples
        --------
        >>> Headed(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "1").whole()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=4, out_features=3, bias=True)
        )
        """
        body: Any = self.features
        body.put(self.head)
        module: nn.Module = body.body
        return module


class Body(nn.Module):
    """A module without its head. It returns the input of the head.

    Parameters
    ----------
    body : nn.Module
        The module. Its head is replaced.
    head : str
        The dotted name of its head.

    Examples
    --------
    >>> import torch
    >>> Body(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "1")(torch.zeros(5, 2, 2)).shape
    torch.Size([5, 4])
    """

    def __init__(self, body: nn.Module, head: str) -> None:
        super().__init__()
        self.body, self.path = body, head
        self.put(_Place())

    def put(self, layer: nn.Module) -> None:
        """Put a layer in the place of the head."""
        parent, _, name = self.path.rpartition(".")
        self.body.get_submodule(parent)._modules[name] = layer

    def forward(self, x: Tensor) -> Tensor:
        """Return z, the input of the head."""
        try:
            self.body(x)
        except _Reached as reached:
            return reached.z
        raise self._never_called()

    def through(self, head: nn.Module, x: Tensor) -> Tensor:
        """Return the output of the module with ``head`` as its head."""
        place: Any = self.body.get_submodule(self.path)
        # In a list, so that it is not registered as a layer of this module.
        place.calls, place.called = [head], False
        try:
            output = tensor_of(self.body(x))
        finally:
            place.calls = []
        if not place.called:
            raise self._never_called()
        return output

    def _never_called(self) -> InputError:
        return InputError(
            f"{type(self.body).__name__} does not call its layer {self.path!r}, which was named "
            "as the head; valid: a layer that the forward pass calls, or a model without a head"
        )


class _Reached(Exception):
    """An exception that ends a forward pass at the head."""

    def __init__(self, z: Tensor) -> None:
        super().__init__()
        self.z = z


class _Place(nn.Module):
    """A placeholder for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[nn.Module] = []
        self.called = False

    def forward(self, *given: Any, **named: Any) -> Any:
        if self.calls:
            self.called = True
            return self.calls[0](*given, **named)
        arguments = [*given, *named.values()]
        if len(arguments) != 1 or not isinstance(arguments[0], Tensor):
            raise InputError(
                f"the head is called with {len(arguments)} arguments; valid: a layer that takes "
                "one tensor, z"
            )
        raise _Reached(arguments[0])


def tensor_of(output: Any) -> Tensor:
    """Return the output of a model as a tensor: itself, or ``logits`` for Hugging Face models.

    Parameters
    ----------
    output : object
        The output of a model.

    Returns
    -------
    Tensor
        The outputs, samples first.

    Raises
    ------
    InputError
        If there is none.

    Examples
    --------
    >>> import torch
    >>> tensor_of(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    >>> tensor_of((torch.zeros(2, 3), None))
    Traceback (most recent call last):
    equipoise.errors.InputError: the model returns a tuple; valid: one tensor, or an object with the
    attribute logits. Wrap the model in a module whose forward returns its tensor, such as output[0]
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    keys = list(output) if isinstance(output, dict) else []
    which = f"output[{keys[0]!r}]" if keys else "output[0]"
    raise InputError(
        f"the model returns a {type(output).__name__}; valid: one tensor, or an object with the "
        "attribute logits. Wrap the model in a module whose forward returns its tensor, such as "
        f"{which}"
    )
