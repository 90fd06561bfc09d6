"""Short training runs of every method, with images, text, and frozen transformers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from equipoise.engine.settings import Machine, Training
from equipoise.methods import build, names
from equipoise.optimizers import Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.processes import Work
from equipoise.run.trainer import Trainer
from tests.engine.federations import images, masks, text
from tests.engine.small_models import (
    WITHOUT_GRADIENT,
    batchnorm,
    lstm,
    single_numbers,
    transformer,
    unet,
)

pictures = partial(images, shape=(1, 8, 8))
SETTINGS = {
    "images": (images, batchnorm, 0.05),
    "images, own statistics": (images, lambda: batchnorm(running=False), 0.05),
    "text": (text, lstm, 0.5),
    "single numbers": (images, single_numbers, 0.05),
    "prompts": (pictures, lambda: transformer(depth=2), 0.1),
    "prompts, plain attention": (pictures, lambda: transformer(fused=False), 0.1),
    "vit": (pictures, lambda: transformer("vit"), 0.05),
    "clip adapter": (pictures, lambda: transformer("clipadapter"), 0.5),
    "clip prompts": (pictures, lambda: transformer("clipprompts", context=3), 0.5),
    "clip prompts, plain attention": (
        pictures,
        lambda: transformer("clipprompts", context=3, fused=False),
        0.5,
    ),
    "fedgc": (pictures, lambda: transformer("fedgc"), 0.1),
}
# Parts that are not methods by name.
VARIANTS = {
    "perfedavg, hessian": {"name": "perfedavg", "hessian": True},
    "moon, projection": {"name": "moon", "projection": 5},
    "fedclip, contrastive": {"name": "fedclip", "contrastive": True},
    "fedgr, given": {"name": "fedgr", "groups": "given"},
    "fedgcr, received": {
        "name": "fedgcr",
        "representation": "received",
        "similarity": "cosine",
        "soft": True,
    },
    "fedper, gifair": {"name": "fedper", "aggregation": {"name": "gifair", "exact": True}},
    "scaffold, norm": {"name": "scaffold", "guard": "norm"},
    "fedper, krum": {"name": "fedper", "guard": "krum"},
    "scaffold, multikrum": {"name": "scaffold", "guard": "multikrum"},
}
# Training a whole transformer is slow, and these rules differ most in how they use it.
OF_VIT = ("fedavg", "ditto", "perfedavg, hessian", "fedcrc", "grace")
# These models train one part only, so methods that treat the parts differently refuse them.
OF_CLIP = (
    "fedavg",
    "fedprox",
    "ditto",
    "perfedavg",
    "perfedavg, hessian",
    "ga",
    "faa",
    "grace",
    "fftgp",
    "fedclip, contrastive",
)
# The model of a single method, which for other methods differs little from "prompts".
OF_FEDGC = ("fedavg", "fedgc", "fedgcr", "fedgcr, received", "fedgr")
# Methods for models of one kind: BatchNorm with statistics, frozen parts, prompts with GC-Net, or
# frozen class tokens.
ONLY = {
    "fedbn": {"images"},
    "fedclip": {"prompts"},
    "promptfl": {"prompts"},
    "fedgc": {"fedgc"},
    "fedgcr": {"fedgc"},
    "fedgcr, received": {"fedgc"},
    "fedgr": {"prompts", "fedgc"},
    "fedper, gifair": {"images"},
}


# Models for images of one channel and 8 x 8 pixels, where the usual MLP does not fit.
_TRANSFORMER = {"patch": 4, "width": 8, "depth": 1, "heads": 2}
_FOR_DIGITS = {
    "fedbn": {"name": "bncnn", "channels": [2, 3, 3], "hidden": [6, 5]},
    "fedgc": {"name": "fedgc", **_TRANSFORMER},
    "fedgcr": {"name": "fedgc", **_TRANSFORMER},
    "fedgr": {"name": "vitprompts", **_TRANSFORMER},
    "fedclip": {"name": "vitprompts", **_TRANSFORMER},
    "promptfl": {"name": "vitprompts", **_TRANSFORMER},
}


def fits(method, what):
    """Whether a method can run with a model, and is worth the time."""
    if VARIANTS.get(method, {}).get("guard") and what not in ("images", "text"):
        # Guards see stacked tensors, whatever the model.
        return False
    if what not in ONLY.get(method, SETTINGS):
        return False
    if what == "text" and build(**VARIANTS.get(method, {"name": method})).needs_images:
        return False
    kinds = {"vit": OF_VIT, "fedgc": OF_FEDGC}
    return method in kinds.get(what, (method,)) and (
        method in OF_CLIP or not what.startswith("clip")
    )


PAIRS = [
    (method, what) for method in (*names(), *VARIANTS) for what in SETTINGS if fits(method, what)
]


def setting_for(method):
    """Return the name of a setting for a method: images, if they fit."""
    valid = ONLY.get(method, SETTINGS)
    return next(what for what in ("images", "fedgc", "prompts") if what in valid)


def fitting(method):
    """Return a federation and a model for a method: by default images and BatchNorm."""
    federation, model, _ = SETTINGS[setting_for(method)]
    return federation(), model()


def model_for_digits(method):
    """Return the name and options of a small model for a method, and for images of digits."""
    return _FOR_DIGITS.get(method, {"name": "mlp", "hidden": [16]})


def trained_by(method, what, *, rounds=3, **how):
    """Train as :func:`models_after` does, and give the models after the last round only."""
    (models,) = models_after((rounds,), method, what, **how)
    return models


def models_after(rounds, method, what, *, chunk, device="cpu", replay=False, team=None):
    """Train six of ten clients a round, and give the models after each of ``rounds``: the global
    one and the personal ones, if there are any. ``team`` makes the other processes of the run.
    """
    federation, model, lr = SETTINGS[what]
    data, made = federation(), build(**VARIANTS.get(method, {"name": method}))
    settings = (
        Training(
            rounds=max(rounds), cohort=6, batch_size=8, epochs=2, optimizer=Sgd(lr=lr, momentum=0.5)
        ),
        Machine(device=device, precision="float64", chunk=chunk, replay=replay),
        Evaluation(every=0),
        0,
    )
    work = Work(data, made, made.extend(model(), data.shape, 0), *settings)
    found = []
    with nullcontext() if team is None else team(work) as others:
        engine = {} if others is None else {"engine": others.engine}
        trainer = Trainer(data, made, work.model, *settings, **engine)

        def note(progress):
            if progress.round in rounds:
                found.append(_models_of(trainer))

        trainer.run(on_round=note)
    return found


def _models_of(trainer):
    """Copy the models of a trainer, which later rounds may change in place."""
    models = {f"global {name}": tensor for name, tensor in trainer.global_model.items()}
    if trainer.engine.remembering:
        _, own = trainer.personal_models(trainer.federation.seen)
        models |= {f"own {name}": stack for name, stack in own.items()}
    return {name: tensor.cpu().clone() for name, tensor in models.items()}


def skipped(models, what):
    """Return the tensors whose true gradient is zero, which optimizers fill with rounding noise."""
    return {name for name in models if what != "text" and name.split()[1] in WITHOUT_GRADIENT}


# Masks need a U-Net, which is slow: one method with first and one with second derivatives.
SETTINGS["segmentation"] = (masks, unet, 0.1)
PAIRS += [("fedavg", "segmentation"), ("perfedavg, hessian", "segmentation")]
