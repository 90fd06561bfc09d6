"""The client side of a run on Flower. It uses the same local code as in one process."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import (
    DEFAULT_TTL,
    ConfigRecord,
    Context,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.common.constant import ErrorCode
from torch import Tensor

from equipoise.engine.arithmetic import exact_arithmetic
from equipoise.engine.cohort import StackedCohort
from equipoise.engine.contract import Personal
from equipoise.engine.evaluation import Measured
from equipoise.engine.layout import KEPT
from equipoise.errors import InputError, RunError
from equipoise.flower.limits import Refusal
from equipoise.flower.memory import Versions
from equipoise.flower.requests import check_request
from equipoise.flower.settings import Privacy
from equipoise.flower.silo import OwnData, Silo, open_silo
from equipoise.flower.wire import (
    EVALUATION,
    LOCAL,
    VERSIONS,
    from_record,
    pack,
    settings_of,
    to_metrics,
    to_record,
    unpack,
    versions_here,
)
from equipoise.method import Updates
from equipoise.tree import PERSONAL, Tree, digest

log = logging.getLogger("flwr.equipoise")

Answer = Callable[[Silo, RecordDict], RecordDict]

# The records that a mod reads: parameters and settings.
_MODEL, _SETTINGS = "model", "settings"


def client_app(experiment: str | Path, *, data: OwnData | None = None) -> ClientApp:
    """Create the ``ClientApp`` of an experiment.

    Parameters
    ----------
    experiment : path
        The experiment's file.
    data : callable, optional
        Returns the client's own federation, of one client, for its node's configuration. By default
        a node's ``data`` names a directory (see `equipoise.data.silos`), or each node reads the
        experiment's source and uses its own client.

    Returns
    -------
    ClientApp
        It handles ``train``, ``evaluate`` and ``query`` messages of
        :func:`equipoise.flower.server.server_app`.

    Examples
    --------
    >>> type(client_app("experiment.yaml")).__name__
    'ClientApp'
    """
    app, path = ClientApp(), Path(experiment)

    def answering(kind: str, answer: Answer) -> Callable[[Message, Context], Message]:
        def handle(message: Message, context: Context) -> Message:
            try:
                silo = open_silo(path, context.run_config, context.node_config, data)
                check_request(silo, kind, message.content)
                with exact_arithmetic(silo.engine.machine):
                    content = answer(silo, message.content)
            except Refusal as refusal:
                log.warning("refused a message %r: %s", kind, refusal)
                return _failure(f"the client refuses: {refusal}", message)
            except (InputError, RunError) as error:
                # Otherwise Flower logs a traceback and sends the error with its type.
                log.error("cannot answer a message %r: %s", kind, error)
                return _failure(str(error), message)
            note = {"client": silo.client, "round": settings_of(message.content).get("round", 0)}
            content["note"] = ConfigRecord(settings_of(content, "note") | note)
            return Message(content, reply_to=message)

        return handle

    app.train()(answering("train", train))
    app.evaluate()(answering("evaluate", evaluate))
    app.evaluate("models")(answering("evaluate.models", evaluate_models))
    app.query("describe")(answering("query.describe", describe))
    app.query("ask")(answering("query.ask", ask))
    app.query("kept")(answering("query.kept", kept))
    app.query("adopt")(answering("query.adopt", adopt))
    return app


def _failure(reason: str, message: Message) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def describe(silo: Silo, content: RecordDict) -> RecordDict:
    """Return the client's description: its number, its sizes and the shape of its data."""
    run = str(settings_of(content).get("run", ""))
    about = ConfigRecord({"text": silo.describe(run).text()})
    return RecordDict({"about": about, VERSIONS: ConfigRecord({**versions_here()})})


def train(silo: Silo, content: RecordDict) -> RecordDict:
    """Train, update the memory, and send what the method shares."""
    asked = settings_of(content)
    memory = silo.memory(str(asked["run"]))
    cohort = _cohort(silo, content, memory)
    cohort.wanted_reports = set(json.loads(str(asked["reports"])))
    cohort.evaluates_local = bool(settings_of(content, EVALUATION).get(LOCAL))
    model = _model(silo, content)
    sent = {
        name.removeprefix("sent."): from_record(record)
        for name, record in content.array_records.items()
        if name.startswith("sent.")
    }
    for name, known in json.loads(str(asked["once"])).items():
        if name in sent:
            memory.hold(known, sent[name])
        elif (held := memory.held(known)) is not None:
            sent[name] = held
        else:
            return RecordDict({"note": ConfigRecord({"lacks": name})})
    shared = {_MODEL: model} | {name: _on_device(silo, tree) for name, tree in sent.items()}
    each = {
        name: row.unsqueeze(0) for name, row in from_record(content.array_records["each"]).items()
    }
    updates = cohort.train(shared, each, silo.experiment.method.local)
    silo.engine.memory.commit()
    version = int(asked["round"]) + 1
    if remembered := silo.engine.memory.export():
        memory.write(version, remembered)
    memory.prune(int(asked["oldest"]), version)
    answer = _answer(silo, model, updates)
    for split, measured in cohort.local_metrics.items():
        answer[f"{LOCAL}.{split}"] = _metrics(measured)
    return answer


def evaluate(silo: Silo, content: RecordDict) -> RecordDict:
    """Report loss and metrics of a model on one of the client's own splits."""
    cohort = _cohort(silo, content)
    measured = cohort.evaluate(_model(silo, content), str(settings_of(content)["split"]))
    return RecordDict({"reports": to_metrics(measured)})


def evaluate_models(silo: Silo, content: RecordDict) -> RecordDict:
    """Report loss and metrics of the global and the personal model on the client's own splits."""
    _cohort(silo, content)
    asked, model = settings_of(content), _model(silo, content)
    reports: dict[str, Any] = {}
    for kind in str(asked["models"]).split():
        personal = _personal(silo, int(asked["round"])) if kind == "personal" else None
        for split, measured in silo.engine.evaluate(model, silo.ids, personal=personal).items():
            reports[f"{kind}.{split}"] = _metrics(measured)
    return RecordDict(reports)


def ask(silo: Silo, content: RecordDict) -> RecordDict:
    """Answer a question of the local rule."""
    asked = settings_of(content)
    cohort = _cohort(silo, content)
    tensors = _on_device(silo, from_record(content.array_records["arguments"]))
    answer = cohort.ask(
        str(asked["question"]),
        *unpack(str(asked["arguments"]), tensors),
        model=_model(silo, content) if asked["about_a_model"] else None,
        split=str(asked["split"]),
        each={
            name: row.unsqueeze(0)
            for name, row in from_record(content.array_records["each"]).items()
        },
    )
    text, parts = pack(answer)
    return RecordDict({"answer": to_record(parts), "form": ConfigRecord({"text": text})})


def kept(silo: Silo, content: RecordDict) -> RecordDict:
    """Send the parts of the shared model that the client keeps, for ``evaluation.average_kept``."""
    _cohort(silo, content)
    rule, model = silo.experiment.method.local, _model(silo, content)
    memory, _ = silo.engine.memory.read(silo.ids, silo.engine.first_memory(rule, model))
    own = {name: rows[0] for name, rows in memory[KEPT].items() if not name.startswith(PERSONAL)}
    return RecordDict({"kept": to_record(own)})


def adopt(silo: Silo, content: RecordDict) -> RecordDict:
    """Save the client's final model on its own disk: the personal model, or the global one."""
    asked = settings_of(content)
    memory = silo.memory(str(asked["run"]))
    _cohort(silo, content, memory)
    model = _model(silo, content)
    if asked["personal"]:
        still, own = silo.engine.personal_models(
            model, _personal(silo, int(asked["round"])), silo.ids
        )
        rows = {name: stack[0] for name, stack in own.items()}
        model = {name: rows.get(name, still.get(name)) for name in model}  # type: ignore[misc]
    path = memory.adopt(model, int(asked["round"]))
    return RecordDict({"kept": ConfigRecord({"path": str(path)})})


def _cohort(silo: Silo, content: RecordDict, memory: Versions | None = None) -> StackedCohort:
    """Return a cohort of this client, with the version of its memory that the message names."""
    asked, engine, method = settings_of(content), silo.engine, silo.experiment.method
    memory = memory or silo.memory(str(asked["run"]))
    initial = engine.network.initial()
    remembers = bool(engine.first_memory(method.local, initial) or method.local.facts())
    if remembers and asked["version"] and not memory.folder.exists():
        log.warning(
            "%s has no memory of this run: client %d starts anew", memory.folder.parent, silo.client
        )
        remembers = False
    engine.restore(memory.read(int(asked["version"])) if remembers else {})
    return engine.cohort(method, silo.ids, int(asked["round"]))


def _model(silo: Silo, content: RecordDict) -> Tree:
    """Complete the received model with the tensors that are not sent."""
    received = _on_device(silo, from_record(content.array_records[_MODEL]))
    initial = silo.engine.network.initial()
    if strays := sorted(set(received) - set(initial)):
        raise RunError(
            f"the server sent {strays[0]}, which the client's model does not have; check that both "
            "have the same experiment"
        )
    held = {name: tensor for name, tensor in initial.items() if name not in received}
    asked = settings_of(content)
    if (mine := silo.engine.network.frozen_digest or "") != asked["frozen"]:
        raise RunError(
            f"the frozen tensors of the client's model have the hash {mine or 'of none'}, those of "
            f"the server {asked['frozen']}; use the same weights for both"
        )
    if digest(held) != asked["held"]:
        raise RunError(
            f"{', '.join(list(held)[:3])} differ from those of the server; check that both have "
            "the same model and the same version of PyTorch"
        )
    return {name: received.get(name, tensor) for name, tensor in initial.items()}


def _on_device(silo: Silo, tree: Mapping[str, Tensor]) -> Tree:
    return {name: tensor.to(silo.engine.network.device) for name, tensor in tree.items()}


def _metrics(measured: Measured) -> MetricRecord:
    return to_metrics({name: torch.from_numpy(values) for name, values in measured.items()})


def _personal(silo: Silo, round_: int) -> Personal:
    experiment = silo.experiment
    tuned = experiment.evaluation.fine_tune
    phases = (tuned.phase(experiment.training.optimizer),) if tuned else ()
    return Personal(experiment.method, phases, round_)


def _answer(silo: Silo, model: Tree, updates: Updates) -> RecordDict:
    update = {name: rows[0] for name, rows in {**updates.params, **updates.buffers}.items()}
    if silo.privacy and update:
        update = protected(update, {name: model[name] for name in update}, silo.privacy)
    content: dict[str, Any] = {"update": to_record(update), "reports": to_metrics(updates.reports)}
    for tree, values in updates.uploads.items():
        content[f"upload.{tree}"] = to_record({name: rows[0] for name, rows in values.items()})
    return RecordDict(content)


def protected(update: Tree, received: Tree, privacy: Privacy) -> Tree:
    """Clip an update with Flower's mods, and add noise if the settings include it.

    Parameters
    ----------
    update, received : Tree
        The trained and the received parameters, with the same names.
    privacy : Privacy
        The settings of clipping and noise.

    Returns
    -------
    Tree
        The protected parameters, which may leave the client.

    Examples
    --------
    >>> protected({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)}, Privacy(clip=1.0))
    {'w': tensor([0.6000, 0.8000])}
    """
    mod: Any = fixedclipping_mod
    if privacy.epsilon is not None:
        mod = LocalDpMod(
            privacy.clip, privacy.sensitivity or privacy.clip, privacy.epsilon, privacy.delta
        )
    settings = ConfigRecord({"clipping_norm": privacy.clip})
    metadata = Metadata(0, "", 0, 0, "", "", time.time(), DEFAULT_TTL, "train")
    sent = make_message(metadata, RecordDict({_MODEL: to_record(received), _SETTINGS: settings}))
    context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={})
    answer = mod(
        sent,
        context,
        lambda message, _: Message(RecordDict({_MODEL: to_record(update)}), reply_to=message),
    )
    if answer.has_error():
        raise RunError(f"the update could not be protected: {answer.error.reason}")
    made = from_record(answer.content.array_records[_MODEL])
    return {name: made[name].to(tensor.device) for name, tensor in update.items()}
