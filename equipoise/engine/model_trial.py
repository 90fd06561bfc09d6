"""The trial of a model before training: whether it can be trained, and whether clients stack."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.func import vmap

from equipoise.engine.model_checks import (
    check_outputs,
    checked_metrics,
    counting,
    known_to_stack,
    naming,
    random_states,
)
from equipoise.engine.network import Network
from equipoise.engine.slots import slots_of
from equipoise.engine.stack import why_not_stacked
from equipoise.errors import InputError
from equipoise.models.frozen import lower_frozen
from equipoise.models.functions import Carried, Watched, advice
from equipoise.models.headed import Headed, refuse_bytes, tensor_of
from equipoise.models.norm_layers import BatchNorm
from equipoise.models.passes import Forward
from equipoise.tree import Tree

# Relative tolerance when two outputs of a model are compared. TF32 rounds more than float32, and
# each of many frozen layers in a lower precision adds its own rounding error. A model that combines
# samples differs by far more.
_ROUNDING = {None: 0.01, torch.bfloat16: 0.1}


@torch.no_grad()
def try_out(network: Network, x: Tensor, y: Tensor, outputs: int) -> None:
    """Check that a model can be trained, and gives the same outputs as the original module.

    The model must return one number per class, or a target, for each sample. Apart from BatchNorm,
    the output for a sample must not depend on the other samples of the batch. The model must not
    change its tensors in place or draw from PyTorch's random generators. The parameters are
    perturbed slightly first, to detect those that a call does not use.

    This also determines whether clients can be stacked, and whether functions that the model calls,
    such as ``torch.nn.functional.dropout``, must be replaced by :mod:`equipoise.models.functions`.

    Parameters
    ----------
    network : Network
        The model. Its attributes are set according to the results.
    x, y : Tensor
        A few samples and their targets.
    outputs : int
        Number of classes or targets.

    Raises
    ------
    InputError
        If a check fails.
    """
    refuse_bytes(network.module, x)
    trial = _Trial(network, x)
    network.functions = functions = Carried()
    with _without_autocast(network), naming(x):
        trial.encode()
        trial.decide_composition()
        trial.check_outputs(y, outputs)
        trial.check_side_effects()
        trial.check_single_samples()
        trial.check_original()
    trial.check_dropout()
    if functions.seen or not all(map(known_to_stack, network.module.modules())):
        network.unstackable = trial.why_not_stacked()
    network.functions = Carried() if functions.seen else None
    network.release()


@contextmanager
def _without_autocast(network: Network) -> Iterator[None]:
    """Apply a network in full precision inside a ``with`` block."""
    lowered, network.autocast = network.autocast, None
    try:
        yield
    finally:
        network.autocast = lowered


class _Trial:
    """Calls a network with a few samples, and compares the outputs.

    Parameters
    ----------
    network : Network
        The model.
    x : Tensor
        A few samples.

    Attributes
    ----------
    seen : Tensor
        What the network takes as x: the samples, or the output of its stem.
    params : Tree
        The parameters of all calls except those of :meth:`why_not_stacked`.
    training : Forward
        The state of a training pass.
    output : Tensor
        The output for ``seen`` in evaluation mode; set by :meth:`check_outputs`.
    """

    output: Tensor

    def __init__(self, network: Network, x: Tensor) -> None:
        self.network, self.x, self.seen = network, x, x
        self.params = self._moved_a_little(0)
        self.key = torch.zeros((), dtype=torch.int64, device=x.device)
        self.training = Forward(train=True, key=self.key)
        self._before = random_states(network.device)
        self._versions = {name: tensor._version for name, tensor in self.params.items()}
        # Normalisation kernels change statistics without increasing their version.
        self._statistics = {name: self.params[name].clone() for name in network.buffers}

    def encode(self) -> None:
        """Apply the stem, if data are encoded, and count its activations."""
        if self.network.encoded:
            with counting(self.network.module) as counted:
                self.seen = self.network.encode(self.x)
            self.network.stem_activations = counted[0] // len(self.x)

    def decide_composition(self) -> None:
        """Determine whether a model that was divided at its head processes the head's output."""
        network = self.network
        if not isinstance(network.module, Headed) or not network.composed:
            return
        network.composed = False
        whole = self._evaluated(self.seen)
        network.composed = True
        try:
            apart = self._evaluated(self.seen)
        except InputError:
            # The head has more inputs than z.
            network.composed = False
        else:
            network.composed = not self._far(apart, whole)

    def check_outputs(self, y: Tensor, outputs: int) -> None:
        """Check the outputs and the metrics of the task."""
        self.output = self._evaluated(self.seen)
        check_outputs(self.network.task, self.output, y, outputs)
        self.network.measures = checked_metrics(self.network.task, self.output, y)

    def check_side_effects(self) -> None:
        """Refuse models that draw random numbers or change their tensors."""
        network, params = self.network, self.params
        shared = self._shared()
        seen, seen_version = self.seen.clone(), self.seen._version
        with counting(network.module) as counted:
            network.apply(params, self.seen, self.training)
        self._activations_together = counted[0]
        now = random_states(network.device)
        if any(not torch.equal(*pair) for pair in zip(self._before, now, strict=True)):
            drawing = self._drawing()
            named = f" by {drawing[0]}" if drawing else ""
            raise InputError(
                f"the model draws its own random numbers{named}, which are not reproducible; "
                f"{advice(drawing)}"
            )
        for name, tensor in params.items():
            changed = tensor._version != self._versions[name]
            if changed or not tensor.equal(self._statistics.get(name, tensor)):
                raise InputError(
                    f"the model changes {name} in place in its forward pass, which would affect "
                    "all clients; valid: layers of nn.BatchNorm, and buffers that are assigned "
                    "anew (self.mean = ...)"
                )
        for name, (tensor, version) in self._shared().items():
            old, old_version = shared.get(name, (tensor, version))
            if tensor is old:
                changed = version != old_version
            else:
                # A mask that is made anew for samples of another size is no change.
                changed = tensor.shape == old.shape and not tensor.equal(old)
            if changed:
                raise InputError(
                    f"the model changes {name} in its forward pass, but all clients share this "
                    "tensor; valid: a persistent buffer of floating point numbers that is "
                    "assigned anew (self.count = self.count + 1)"
                )
        if self.seen._version != seen_version and not self.seen.equal(seen):
            raise InputError(
                "the model changes its samples in place in its forward pass, which other passes "
                "read again; valid: operations that return another tensor (x / 2 instead of "
                "x.div_(2))"
            )

    def check_single_samples(self) -> None:
        """Refuse outputs that depend on other samples, and count activations per sample."""
        network = self.network
        with counting(network.module) as counted:
            first = self._evaluated(self.seen[:1])
        # Not split(), which returns an empty batch for no samples.
        others = [self.seen[row : row + 1] for row in range(1, len(self.seen))]
        alone = torch.cat([first, *map(self._evaluated, others)])
        network.activations = (
            (self._activations_together - counted[0]) // len(others) if others else counted[0]
        )
        network.fixed_activations = counted[0] - network.activations
        if not network.batchwise and self._far(self.output, alone):
            raise InputError(
                "the model's output for a sample depends on the other samples of its batch, or on "
                "their order; valid: models with the batch as first dimension (batch_first=True) "
                "that combine samples only in nn.BatchNorm"
            )

    def check_original(self) -> None:
        """Compare the outputs with those of the original module, in evaluation mode."""
        network = self.network
        module = copy.deepcopy(network.given).to(device=network.device, dtype=network.dtype).eval()
        if network.lowered is not None:
            lower_frozen(module, network.lowered)
        for slot in slots_of(module):
            if slot.name in self.params:
                slot.tensor.copy_(self.params[slot.name])
        if self._far(self.output, tensor_of(module(self.x)).to(network.dtype)):
            raise InputError(
                "the converted model gives other outputs than the original: it has parameters that "
                "are not attributes of a module, layers with a special evaluation mode, or "
                "subclasses of nn.BatchNorm with another behaviour"
            )

    def check_dropout(self) -> None:
        """Refuse random numbers of a sample that depend on the size of its batch."""
        network, seen = self.network, self.seen
        drops = network.has_dropout or bool(network.functions and network.functions.seen)
        if not drops or network.batchwise or len(seen) == 1:
            return
        for layer in network.module.modules():
            if isinstance(layer, BatchNorm):
                layer.moves = False
        fewer, all_of_them = (
            network.apply(self.params, x, self.training).output for x in (seen[:-1], seen)
        )
        network.rest_unless(network.initial().__contains__)
        if self._far(fewer, all_of_them[:-1]):
            raise InputError(
                "dropout of a sample depends on the number of samples in its batch; valid: "
                "dropout of tensors whose first dimension is that of the samples (batch_first=True)"
            )

    def why_not_stacked(self) -> str:
        """Return why two clients cannot be stacked, with gradients; empty if they can."""
        network, x = self.network, self.seen[:2]
        clients = [self._moved_a_little(seed) for seed in (0, 1)]
        if not clients[0]:
            return ""
        keys = [self.key, self.key + 1]

        def output_of(params: Tree, x: Tensor, key: Tensor, stacked: bool = True) -> Tensor:
            return network.apply(params, x, Forward(train=True, key=key, stacked=stacked)).output

        leaves = {name: torch.stack([client[name] for client in clients]) for name in clients[0]}
        trained = [
            leaf.requires_grad_() for name, leaf in leaves.items() if name not in network.buffers
        ]
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                # PyTorch warns about operations that it repeats for every client.
                warnings.simplefilter("ignore")
                found = vmap(output_of)(leaves, torch.stack([x, x]), torch.stack(keys))
                torch.autograd.grad(found.sum(), trained, allow_unused=True)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            return why_not_stacked(error)
        wanted = torch.stack(
            [output_of(*given, False) for given in zip(clients, (x, x), keys, strict=True)]
        )
        return (
            "stacked clients get other outputs than single ones" if self._far(found, wanted) else ""
        )

    def _evaluated(self, x: Tensor) -> Tensor:
        """Return the output for a batch in evaluation mode."""
        return self.network.apply(self.params, x, Forward(train=False)).output

    def _moved_a_little(self, seed: int) -> Tree:
        """Return the initial parameters with a little noise, to detect those that are not used."""
        draws = torch.Generator().manual_seed(seed)
        params = {}
        for name, tensor in self.network.initial().items():
            noise = torch.rand(tensor.shape, generator=draws, dtype=tensor.dtype).to(tensor.device)
            params[name] = tensor * (1 + 0.2 * noise) + 0.01 * noise
        return params

    def _shared(self) -> dict[str, tuple[Tensor, int]]:
        """Return the tensors of which clients have no copies, and their versions."""
        module = self.network.module
        return {
            name: (tensor, tensor._version)
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if name not in self.params
        }

    def _drawing(self) -> list[str]:
        """List the functions that draw from PyTorch's generators, in evaluation or in training."""
        network = self.network
        network.functions = watched = Watched(partial(random_states, network.device))
        self._evaluated(self.seen)
        network.apply(self.params, self.seen, self.training)
        return watched.drawing

    def _far(self, found: Tensor, wanted: Tensor) -> bool:
        """Return whether outputs differ by more than rounding."""
        allowed = _ROUNDING[self.network.lowered] * wanted.norm() + 1e-6
        return found.shape != wanted.shape or bool((found - wanted).norm() > allowed)
