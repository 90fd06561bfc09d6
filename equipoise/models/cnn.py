"""Small convolutional models. The head is always the last linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from equipoise.checks import count, flag, image, probability, several
from equipoise.errors import InputError
from equipoise.models.base import Model


def cnn2(
    shape: tuple[int, ...], classes: int, *, channels: Sequence[int] = (32, 64), hidden: int = 512
) -> Model:
    """Build two convolutions followed by two fully connected layers (GIFAIR-FL, section 5.1.3).

    The paper does not specify widths. The defaults are those of the CNN in the FedAvg paper
    (McMahan et al., 2017): 5x5 convolutions with 32 and 64 channels that keep the image size, a 2x2
    max-pool after each, and 512 hidden units. This gives 1,663,370 parameters for 28x28 grey images
    and ten classes.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image, at least 4x4.
    classes : int
        Number of classes, or of outputs in regression.
    channels : sequence of two int
        Channels of the two convolutions.
    hidden : int
        Width of the first fully connected layer.

    Returns
    -------
    Model
        ``features`` ends after the first fully connected layer; ``head`` is the second.

    Examples
    --------
    >>> cnn2((1, 28, 28), 62).head
    Linear(in_features=512, out_features=62, bias=True)
    """
    depth, height, width = image(shape, "cnn2", smallest=4)
    first, second = several(channels, "channels of model 'cnn2'", count, length=2)
    units = count(hidden, "hidden of model 'cnn2'")
    features = nn.Sequential(
        nn.Conv2d(depth, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), units),
        nn.ReLU(),
    )
    return Model(features, nn.Linear(units, classes))


def cnn4(
    shape: tuple[int, ...], classes: int, *, channels: Sequence[int] = (32, 32, 64, 64)
) -> Model:
    """Build four convolutions followed by one fully connected layer (FedCRC).

    The paper does not specify widths. The defaults are 3x3 convolutions that keep the image size,
    with 32, 32, 64 and 64 channels, and a 2x2 max-pool after the second and the fourth, so that
    images of 8x8 pixels can be used.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image, at least 4x4.
    classes : int
        Number of classes, or of outputs in regression.
    channels : sequence of four int
        Channels of the four convolutions.

    Returns
    -------
    Model
        ``features`` holds the four convolutions; ``head`` is the fully connected layer (FedCRC's
        predictor).

    Examples
    --------
    >>> cnn4((3, 32, 32), 10).head
    Linear(in_features=4096, out_features=10, bias=True)
    """
    depth, height, width = image(shape, "cnn4", smallest=4)
    first, second, third, fourth = several(channels, "channels of model 'cnn4'", count, length=4)
    features = nn.Sequential(
        nn.Conv2d(depth, first, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, third, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(third, fourth, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return Model(features, nn.Linear(fourth * (height // 4) * (width // 4), classes))


def bncnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 32, 32),
    hidden: Sequence[int] = (64,),
    kernel: int = 5,
    pools: int = 2,
    running: bool = True,
) -> Model:
    """Build convolutions and fully connected layers, each with BatchNorm.

    It is a smaller form of FedBN's model for digits. Convolutions keep the image size, and a 2x2
    max-pool follows each of the first ``pools``. FedBN's own widths are ``channels=(64, 64, 128)``
    and ``hidden=(2048, 512)``. The options ``channels=(64, 64, 64, 64)``, ``hidden=()``,
    ``kernel=3`` and ``pools=4`` give four convolutions and one fully connected layer, as described
    by FedBABU and FedCRC.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image, at least 4x4; twice as large for every pool beyond
        two.
    classes : int
        Number of classes, or of outputs in regression.
    channels : sequence of int
        Channels of each convolution.
    hidden : sequence of int
        Width of each fully connected layer before the last.
    kernel : int
        Height and width of the convolutions' kernels, an odd number.
    pools : int
        Number of convolutions that are followed by a max-pool.
    running : bool
        Whether BatchNorm keeps running statistics and uses them in evaluation. If false, a client's
        samples are normalised by their own mean and variance in evaluation too, as in FedBABU's
        public code. Accuracy on a sample then depends on the client's other samples.

    Returns
    -------
    Model
        ``features`` ends after the last hidden layer; ``head`` is the last linear layer, without
        BatchNorm.

    Examples
    --------
    >>> bncnn((1, 8, 8), 10).head
    Linear(in_features=64, out_features=10, bias=True)
    """
    halvings = count(pools, "pools of model 'bncnn'", least=0)
    depth, height, width = image(shape, "bncnn", smallest=2**halvings)
    if count(kernel, "kernel of model 'bncnn'") % 2 == 0:
        raise InputError(
            f"kernel of model 'bncnn' must be odd, got {kernel}: an even one would change the "
            "image size"
        )
    keeps = flag(running, "running of model 'bncnn'")
    layers: list[nn.Module] = []
    convolutions = pairwise((depth, *several(channels, "channels of model 'bncnn'", count)))
    for index, (before, depth) in enumerate(convolutions):
        # BatchNorm subtracts the mean, so a bias before it would have no effect.
        convolution = nn.Conv2d(before, depth, kernel, padding=kernel // 2, bias=False)
        layers += [convolution, nn.BatchNorm2d(depth, track_running_stats=keeps), nn.ReLU()]
        if index < halvings:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    layers.append(nn.Flatten())
    units = depth * height * width
    for wider in several(hidden, "hidden of model 'bncnn'", count):
        layers += [
            nn.Linear(units, wider, bias=False),
            nn.BatchNorm1d(wider, track_running_stats=keeps),
            nn.ReLU(),
        ]
        units = wider
    return Model(nn.Sequential(*layers), nn.Linear(units, classes))


def pflcnn(
    shape: tuple[int, ...], classes: int, *, dropout: Sequence[float] = (0.25, 0.5)
) -> Model:
    """Build the CIFAR-10 model of pfl-research's benchmarks, for speed comparisons.

    Two 3x3 convolutions without padding (32 and 64 channels), a 2x2 max-pool, 128 hidden units,
    dropout before and after the hidden layer: 1,626,442 parameters for 3x32x32 images and ten
    classes.

    Parameters
    ----------
    shape : tuple of int
        Channels, height and width of one image, at least 6x6.
    classes : int
        Number of classes, or of outputs in regression.
    dropout : sequence of two float
        Probabilities of dropping a unit after the max-pool and after the hidden layer.

    Returns
    -------
    Model
        ``features`` ends after the hidden layer; ``head`` is the last linear layer.

    Examples
    --------
    >>> pflcnn((3, 32, 32), 10).head
    Linear(in_features=128, out_features=10, bias=True)
    """
    depth, height, width = image(shape, "pflcnn", smallest=6)
    after_pool, after_hidden = several(dropout, "dropout of model 'pflcnn'", probability, length=2)
    features = nn.Sequential(
        nn.Conv2d(depth, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(after_pool),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(after_hidden),
    )
    return Model(features, nn.Linear(128, classes))
