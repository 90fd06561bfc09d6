"""Which tensors of a client are sent, which stay with it, and which are constant."""

from __future__ import annotations

import torch

from equipoise.errors import InputError
from equipoise.method import LocalRule
from equipoise.tree import PERSONAL, Tree, select

# The tree of a client's memory that the engine itself reads: the parts that its local rule keeps.
KEPT = "kept"


class Layout:
    """The names of a local rule's tensors, by where they are stored.

    Parameters
    ----------
    local : LocalRule
        The local rule, with its phases and kept parts.
    model : Tree
        The global model.

    Attributes
    ----------
    kept : list of str
        The tensors that stay with a client.
    shared : list of str
        The tensors that a client trains and sends back.

    Examples
    --------
    >>> from equipoise.methods import build
    >>> model = {"features.weight": torch.zeros(2), "head.weight": torch.zeros(2)}
    >>> layout = Layout(build("fedper").local, model)
    >>> layout.shared, layout.kept
    (['features.weight'], ['head.weight'])
    """

    def __init__(self, local: LocalRule, model: Tree) -> None:
        parts = (local.keeps,) if isinstance(local.keeps, str) else local.keeps
        self.kept: list[str] = []
        for part in parts:
            if part == "personal" or part.startswith(PERSONAL):
                base = part.removeprefix("personal").removeprefix(".") or "all"
                self.kept += [PERSONAL + name for name in select(model, base)]
            else:
                self.kept += select(model, part)
        names = [*model, *(name for name in self.kept if name.startswith(PERSONAL))]
        moving = {name for phase in local.phases() for name in select(names, phase.move)}
        if stray := sorted(
            name for name in moving if name.startswith(PERSONAL) and name not in self.kept
        ):
            raise InputError(
                f"{type(local).__name__} trains {stray[0]} but does not keep it; add it to keeps"
            )
        self.shared = [name for name in model if name in moving and name not in self.kept]

    @property
    def kept_of_shared(self) -> list[str]:
        """The tensors of the shared model that stay with a client, without second copies.

        Examples
        --------
        >>> from equipoise.methods import build
        >>> model = {"features.weight": torch.zeros(2), "head.weight": torch.zeros(2)}
        >>> [Layout(build(name).local, model).kept_of_shared for name in ("fedper", "ditto")]
        [['head.weight'], []]
        """
        return [name for name in self.kept if not name.startswith(PERSONAL)]

    def travelling(self, model: Tree, initial: Tree) -> list[str]:
        """Return the names of the tensors of a model that must be sent to clients.

        Both sides build the same initial model. Tensors that are not trained and shared are sent
        only if the server has changed them since.

        Parameters
        ----------
        model : Tree
            The model to send.
        initial : Tree
            The initial model of both sides.

        Returns
        -------
        list of str
            Names, in the order of ``model``.

        Examples
        --------
        >>> from equipoise.methods import build
        >>> model = {"features.weight": torch.zeros(2), "head.weight": torch.zeros(2)}
        >>> Layout(build("fedper").local, model).travelling(model, dict(model))
        ['features.weight']
        """
        shared = set(self.shared)
        return [
            name
            for name, tensor in model.items()
            if name in shared or not torch.equal(tensor, initial[name])
        ]

    def kept_parts(self, model: Tree) -> Tree:
        """Return the kept parts of a client that has never taken part: those of the model."""
        return {name: model[name.removeprefix(PERSONAL)] for name in self.kept}
