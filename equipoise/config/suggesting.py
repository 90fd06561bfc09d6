"""Errors for unknown keys, with the keys that may have been meant."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from equipoise import methods, models
from equipoise.errors import InputError, unknown

# Settings, and what users and other libraries call them: the last component of a key.
SYNONYMS = {
    "training.rounds": (
        *("num_rounds", "n_rounds", "num_server_rounds"),
        *("global_rounds", "global_epochs", "comm_rounds", "communication_rounds"),
    ),
    "training.cohort": (
        *("clients_per_round", "num_clients_per_round", "client_fraction"),
        *("fraction_fit", "fraction_train", "participation", "participation_rate"),
    ),
    "training.epochs": ("local_epochs", "num_epochs", "n_epochs"),
    "training.steps": ("local_steps", "num_steps"),
    "training.batch_size": ("local_batch_size", "batchsize", "bs"),
    "training.optimizer": ("optim",),
    "training.optimizer.lr": ("learning_rate", "client_lr", "local_lr"),
    "training.optimizer.weight_decay": ("wd", "l2"),
    "training.schedule": ("scheduler", "lr_scheduler", "lr_schedule"),
    "training.schedule.decay": ("lr_decay",),
    "training.clip": ("grad_clip", "clip_norm", "max_grad_norm"),
    "training.loss": ("criterion", "loss_fn", "loss_function"),
    "training.augment": ("augmentation", "augmentations", "transforms"),
    "evaluation.every": ("eval_every", "evaluate_every", "eval_interval"),
    "evaluation.patience": ("early_stopping", "early_stop"),
    "machine.device": ("gpu", "cuda", "accelerator"),
    "machine.precision": ("dtype",),
    "machine.processes": ("workers", "n_jobs"),
    "data.partition.clients": ("num_clients", "n_clients"),
    "data.partition.beta": ("dirichlet_alpha",),
    "data.splits": ("test_size", "val_size"),
    "method": ("strategy", "algorithm"),
    "model": ("network", "net", "architecture"),
    "seed": ("random_seed", "random_state"),
    "checkpoint_every": ("save_every", "checkpoint_interval"),
}


def unknown_key(key: str, valid: Iterable[str], *, where: str, of: str | None = None) -> InputError:
    """Return the error for an unknown key of an experiment.

    It suggests the keys with the same name elsewhere, such as ``training.optimizer.lr`` for ``lr``,
    else what other libraries call so, else a valid key that is spelt alike.

    Parameters
    ----------
    key, valid, where, of
        As in :func:`equipoise.errors.unknown`, with dotted keys.

    Returns
    -------
    InputError
        For the caller to raise.

    Examples
    --------
    >>> str(unknown_key("rounds", ["data", "training"], where="a.yaml"))
    "unknown key 'rounds' in a.yaml; did you mean 'training.rounds'? Valid: data, training"
    """
    valid = list(valid)
    elsewhere = _with_end(key) or _called_so(key, valid)
    return unknown("key", key, valid, where=where, of=of, elsewhere=elsewhere)


def setting_called(name: str) -> str | None:
    """Return the setting that other libraries call by a name, or None.

    Examples
    --------
    >>> setting_called("learning_rate"), setting_called("rounds")
    ('training.optimizer.lr', None)
    """
    return next((key for key, names in SYNONYMS.items() if name.replace("-", "_") in names), None)


def _called_so(key: str, valid: Collection[str]) -> list[str]:
    """Return the setting that is meant by a key's last component: beside it, or elsewhere."""
    section, _, name = key.rpartition(".")
    meant = setting_called(name)
    if meant is None:
        return []
    beside = f"{section}.{meant.rpartition('.')[2]}"
    return [beside if beside in valid else meant]


def _with_end(key: str) -> list[str]:
    """Return other keys with the same last component, those of the same section if there are any.

    Options of methods and models are returned only if no other key has this end.
    """
    section, end = key.partition(".")[0], key.rpartition(".")[2]
    for known in (_settings(), _options()):
        found = {other for other in known if other.endswith(f".{end}") and other != key}
        near = {other for other in found if other.startswith(f"{section}.")}
        if found:
            return sorted(near or found)
    return []


def _settings() -> Iterator[str]:
    # That package reads this one. Only errors need it.
    from equipoise.explain.keys import settings

    return (setting.key for setting in settings() if setting.of != "studies")


def _options() -> Iterator[str]:
    yield from (f"method.{name}" for of in methods.names() for name in methods.options_of(of))
    yield from (f"model.{name}" for of in models.MODELS for name in models.defaults(of))
