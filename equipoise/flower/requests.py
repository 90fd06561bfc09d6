"""Checks of the requests to a client: only what its experiment allows."""

from __future__ import annotations

import json
from typing import Any

from flwr.app import RecordDict

from equipoise.errors import InputError
from equipoise.flower.limits import Refusal, shown
from equipoise.flower.memory import check_name
from equipoise.flower.silo import Silo
from equipoise.flower.wire import EVALUATION, LOCAL, settings_of
from equipoise.methods import describe_part


def check_request(silo: Silo, kind: str, content: RecordDict) -> None:
    """Refuse a message that requests more than the experiment and the limits of the silo allow.

    Parameters
    ----------
    silo : Silo
        The client side of the run.
    kind : str
        The kind of message, such as ``query.kept``.
    content : RecordDict
        The content of the message.

    Raises
    ------
    Refusal
        With the reason.
    """
    asked = settings_of(content)
    if kind == "query.describe":
        return
    check_name(str(asked.get("run", "")), "run")
    for name in ("round", "version", "oldest"):
        number = asked.get(name)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise Refusal(f"{name} is {shown(number)}, not a whole number from 0")
    if kind == "train":
        _check_training(silo, content, asked)
    if kind == "query.ask" and str(asked.get("question", "_")).startswith("_"):
        raise Refusal(f"{shown(asked.get('question'))} is not a question")
    if kind == "query.kept" and not silo.experiment.evaluation.average_kept:
        raise Refusal(
            "the parts of the model that clients keep were asked for, but evaluation.average_kept "
            "is off"
        )
    if kind in ("query.kept", "query.ask") and silo.privacy is not None:
        what = (
            f"the answer to {shown(asked.get('question'))}"
            if kind == "query.ask"
            else "a part of the model that clients keep"
        )
        raise Refusal(f"{what} would leave without the protection of flower.privacy")


def _check_training(silo: Silo, content: RecordDict, asked: dict[str, Any]) -> None:
    experiment = silo.experiment
    if not silo.trains:
        raise Refusal("this client evaluates models and never trains")
    if "local" in asked and asked["local"] != json.dumps(describe_part(experiment.method.local)):
        raise Refusal(
            f"the message has another local rule, {shown(asked['local'])}; valid: the rule of the "
            "experiment"
        )
    if settings_of(content, EVALUATION).get(LOCAL) and not experiment.evaluation.local:
        raise Refusal("an evaluation of the local model was asked for, but evaluation.local is off")
    if silo.privacy is None:
        return
    try:
        silo.privacy.check(experiment.method.local)
    except InputError as error:
        raise Refusal(str(error)) from error
    if silo.engine.network.buffers:
        raise Refusal(
            "flower.privacy would put noise on the statistics of BatchNorm; choose a model with "
            "GroupNorm"
        )
