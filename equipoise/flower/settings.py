"""Settings of a run on Flower."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from equipoise.checks import UNLESS_DEFAULT, count, one_of, real
from equipoise.errors import InputError

# If one client has spoiled the model, the losses of all others are large, but their answers must
# still be accepted. The bound is therefore far above the losses of a working model. Numbers up to
# it can still be squared and summed.
LARGEST_REPORT = 1e24

if TYPE_CHECKING:
    from equipoise.method import LocalRule


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Clipping and noise that Flower's differential-privacy mods apply to an update on the client.

    Parameters
    ----------
    clip : float
        Largest L2 norm of the difference between the parameters that a client sends and those that
        it received.
    epsilon : float, optional
        Privacy budget of one update: Gaussian noise is added on the client. By default updates are
        only clipped.
    delta : float
        Failure probability of the noise.
    sensitivity : float, optional
        Largest change of the sent values due to one client; ``clip`` by default.

    Examples
    --------
    >>> round(Privacy(clip=1.0, epsilon=8.0, delta=1e-5).noise, 4)
    0.6056
    """

    clip: float
    epsilon: float | None = None
    delta: float = 1e-5
    sensitivity: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that give no protection."""
        for name in ("clip", "epsilon", "sensitivity"):
            value = getattr(self, name)
            if not (value is None and name != "clip") and not 0 < value < inf:
                raise InputError(f"flower.privacy.{name} must be above 0 and finite, got {value!r}")
        if not 0 < self.delta < 1:
            raise InputError(f"flower.privacy.delta must be between 0 and 1, got {self.delta!r}")

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on every component of an update."""
        if self.epsilon is None:
            return 0.0
        from math import log, sqrt

        return (self.sensitivity or self.clip) * sqrt(2 * log(1.25 / self.delta)) / self.epsilon

    def check(self, local: LocalRule) -> None:
        """Refuse a local rule that uploads more than parameters, which alone are protected.

        Examples
        --------
        >>> from equipoise.methods.fedprox import FedProx
        >>> Privacy(clip=1.0).check(FedProx())
        """
        if local.uploads:
            raise InputError(
                f"flower.privacy protects parameters, but {type(local).__name__} also uploads "
                f"{', '.join(local.uploads)}; choose another method or leave flower.privacy out"
            )


@dataclass(frozen=True, kw_only=True)
class FlowerSettings:
    """Settings of a run on Flower, such as for clients that are late or fail.

    Parameters
    ----------
    clients : int
        Number of clients that must have registered before round 1.
    wait : float
        Seconds to wait for them.
    min_clients : int
        Number of clients of a cohort that must answer.
    timeout : float
        Seconds a client may take to answer.
    retries : int
        Number of times that clients without an answer are asked again before the run stops.
    privacy : Privacy, optional
        Clipping and noise on the client side.
    max_client : int, optional
        The largest client number that may register; by default 9,999, or ten times ``clients`` if
        that is more.
    max_share : float, optional
        The largest share that one client may have of the weights of a round, if clients are
        weighted by size.
    max_loss : float
        The largest loss that a client may report, and the negative of the smallest one.
    max_answer : float
        Maximum size of uploads, or of the answer to a question, in megabytes. The size of parameter
        updates is known.
    identity : {"memory", "key"}
        Which node may rejoin with a client's number besides the node that registered it first: one
        with the same memory directory, or only one with the same key. Keys are permanent if
        SuperNodes are started with one.
    roster : str, optional
        A file on the server that lists the clients that may join; see
        :func:`equipoise.flower.identity.read_invited`. A relative path is relative to the
        experiment's file.

    Examples
    --------
    >>> FlowerSettings(clients=4, min_clients=3).timeout
    600.0
    >>> FlowerSettings(clients=4).largest_client, FlowerSettings(max_client=21).largest_client
    (9999, 21)
    """

    clients: int = 2
    wait: float = 600.0
    min_clients: int = 1
    timeout: float = 600.0
    retries: int = 2
    privacy: Privacy | None = None
    max_client: int | None = field(default=None, metadata={UNLESS_DEFAULT: True})
    max_share: float | None = field(default=None, metadata={UNLESS_DEFAULT: True})
    max_loss: float = field(default=LARGEST_REPORT, metadata={UNLESS_DEFAULT: True})
    max_answer: float = field(default=1000.0, metadata={UNLESS_DEFAULT: True})
    identity: str = field(default="memory", metadata={UNLESS_DEFAULT: True})
    roster: str | None = field(default=None, metadata={UNLESS_DEFAULT: True})

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        if self.max_client is not None:
            count(self.max_client, "flower.max_client", least=0)
        for name in ("max_loss", "max_answer"):
            real(getattr(self, name), f"flower.{name}")
        if self.max_share is not None and real(self.max_share, "flower.max_share") > 1:
            raise InputError(f"flower.max_share must be at most 1, got {self.max_share!r}")
        one_of(self.identity, ("memory", "key"), "flower.identity")
        for name, least in (("clients", 1), ("min_clients", 1), ("retries", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"flower.{name} must be a whole number of at least {least}, got {value!r}"
                )
        for name in ("wait", "timeout"):
            if not 0 < getattr(self, name) < inf:
                raise InputError(
                    f"flower.{name} must be a number of seconds above 0, got "
                    f"{getattr(self, name)!r}"
                )
        if self.min_clients > self.clients:
            raise InputError(
                f"flower.min_clients is {self.min_clients}, more than the "
                f"flower.clients={self.clients} waited for"
            )

    @property
    def largest_client(self) -> int:
        """The largest client number that may register."""
        return max(9_999, 10 * self.clients) if self.max_client is None else self.max_client
