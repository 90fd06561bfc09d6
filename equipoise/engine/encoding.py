"""Data encoded by a model's stem before training."""

from __future__ import annotations

import torch
from torch import Tensor

from equipoise.data.encode import encoded_samples
from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.chunking import samples_an_encoding
from equipoise.engine.data import DeviceData
from equipoise.engine.lookups import check_lookups
from equipoise.engine.model_trial import try_out
from equipoise.engine.network import Network
from equipoise.engine.settings import Machine, Training
from equipoise.federation import Federation
from equipoise.models.base import Model


def open_data(
    network: Network, federation: Federation, training: Training, machine: Machine
) -> DeviceData:
    """Check the model on a few samples, let it check all samples, and load them.

    If the model has a stem, samples are encoded with it once, unless they are augmented, a method
    has added a part that changes them first, or ``machine.encode`` is false.

    Parameters
    ----------
    network : Network
        The model. Its attribute ``encoded`` is set.
    federation : Federation
        The samples.
    training, machine
        The settings.

    Returns
    -------
    DeviceData
        The data that ``network`` takes as x.
    """
    device, dtype = network.device, network.dtype
    network.classes = federation.classes
    changed = bool(training.augment) or network.inputs is not None
    network.encoded = network.stem is not None and machine.encode and not changed
    data = DeviceData(federation, device, dtype)
    if not len(data):
        return data
    tried = torch.arange(min(3, len(data)))
    check_lookups(network, federation, tried)
    try_out(network, *data.fetch(tried), federation.outputs)
    for part in network.given.modules():
        if isinstance(part, Model):
            part.check_samples(federation.x)
    if not network.encoded:
        return data

    def encode(samples: Tensor) -> Tensor:
        return network.encode(
            samples.to(device, dtype if samples.is_floating_point() else samples.dtype)
        )

    # The key contains everything that affects rounding, so that results depend only on the
    # settings.
    arithmetic = device.type, dtype, network.lowered, network.autocast, machine.tf32
    with exact_arithmetic(machine):
        key = "stem", network.stem_digest, *map(str, arithmetic)
        about = f"samples of {federation.name} encoded by the stem of {network.name}"
        x = encoded_samples(federation.x, encode, key, samples_an_encoding(network), about)
    return DeviceData(federation, device, dtype, x)
