"""Checks of plain values against the annotations of the code that uses them.

This is the only module that uses pydantic.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from equipoise import data, methods, models, tracking
from equipoise.config.options import defaults_of, in_words, types_of
from equipoise.config.origins import Origins, keyed
from equipoise.config.suggesting import unknown_key
from equipoise.data.augment import AUGMENTATIONS, augmentation_from
from equipoise.data.keys import below, naming
from equipoise.engine.settings import FineTune, Machine, Training
from equipoise.errors import InputError, unknown
from equipoise.flower.settings import FlowerSettings, Privacy
from equipoise.imports import import_own
from equipoise.losses import LOSSES, loss_from
from equipoise.method import Method
from equipoise.metrics import Metric, several_from
from equipoise.optimizers import Adam, Schedule, Sgd
from equipoise.run.evaluation import Evaluation
from equipoise.run.plain import optimizer_from, schedule_from
from equipoise.run.start import Start, start_from
from equipoise.text import represented

# Options of data that configurations leave out if they have these defaults, so that the
# configurations of older runs stay the same.
UNLESS_GIVEN = {"server_val": 0.0, "attributes": None, "scaled": False, "columns": None}


_OPTIMIZERS: dict[str, type[Any]] = {"sgd": Sgd, "adam": Adam, "adamw": Adam}


_SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Reader:
    """Check values against the annotations of the code that uses them."""

    def __init__(self, origins: Origins, on_import: Callable[[str], None] | None = None) -> None:
        self.origins, self.on_import = origins, on_import

    def experiment(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Check all sections of an experiment, and return the fields of ``Experiment``."""
        seed = self.value(content.get("seed", 0), int, "seed")
        if not 0 <= seed < 2**63:
            raise InputError(
                f"{self.origins.of('seed')}: seed must be from 0 to 2**63 - 1, got {seed}"
            )
        machine = self.settings(Machine, content, "machine")
        flower = self.settings(FlowerSettings, content, "flower", privacy=self.privacy)
        given = content.get("checkpoint_every")
        checkpoint_every = None if given is None else self.value(given, int, "checkpoint_every")
        self.training(content, without=("loss", "schedule"))
        # After everything that can be checked without these modules. They may register names that
        # are used below.
        imports = self.imports(content.get("imports", []))
        if "resolved" in content:
            self.refuse_own(content)
        training = self.training(content)
        method = self.method(content.get("method", "fedavg"))
        return {
            "method": method,
            "data": self.data(content["data"], seed),
            "model": self.model(content.get("model", {}), method.usual_model),
            "training": training,
            "machine": machine,
            "evaluation": self.settings(
                Evaluation, content, "evaluation", fine_tune=self.fine_tune, metrics=self.metrics
            ),
            "seed": seed,
            "checkpoint_every": checkpoint_every,
            "start": self.start(content.get("start")),
            "flower": flower,
            "imports": imports,
            "tracking": self.tracking(content.get("tracking", [])),
            "origins": self.origins,
        }

    def refuse_own(self, content: Mapping[str, Any]) -> None:
        """Refuse the configuration of a run that was started from Python with its own objects."""
        given = content.get("data"), content.get("model")
        found, model = (
            one.get("name") if isinstance(one, Mapping) and len(one) == 1 else None for one in given
        )
        own = [f"data {found!r}"] if found is not None and found not in data.SOURCES else []
        own += [f"model {model!r}"] if str(model).startswith("custom:") else []
        if own:
            where = self.origins.where
            raise InputError(
                f"{where}: the run was started from Python with {' and '.join(own)} of its own; "
                "continue it there: equipoise.train(federation, ..., "
                f"out={str(Path(where).parent)!r}, resume=True) with the same arguments, or with "
                "more rounds to make it longer"
            )

    def imports(self, given: Any) -> tuple[str, ...]:
        """Import the user code of an experiment, and return its names."""
        listed = tuple(
            self.value([given] if isinstance(given, str) else given, list[str], "imports")
        )
        with self.origins.named("imports"):
            import_own(listed, on_import=self.on_import)
        return listed

    def method(self, given: Any) -> Method:
        """Build the method of an experiment."""
        checked = self.method_options(given, "method")
        with self.origins.named("method"):
            return methods.build(**checked)

    def method_options(self, given: Any, path: str) -> dict[str, Any]:
        """Check the options of a method and of the methods and parts in its options."""
        name, options = self.named(given, path, "method", methods.names(), default="fedavg")
        types, special = self.options_of_part(name)
        for slot in ("sampling", "local", "aggregation", "view"):
            types[slot], special[slot] = Any, self.part
        types["guard"], special["guard"] = Any, self.guard
        types |= {"weights": str}
        return {"name": name, **self.fields(options, types, path, special, of=f"method {name!r}")}

    def part(self, given: Any, path: str, slot: str | None = None) -> dict[str, Any]:
        """Check a part of a method and its options."""
        slot = slot or path.rpartition(".")[2]
        name, options = self.named(given, path, default={"sampling": "uniform"}.get(slot))
        valid = methods.fitting("sampler" if slot == "sampling" else slot)
        if name not in valid:
            raise unknown(path, name, valid, where=self.origins.of(path))
        types, special = self.options_of_part(name)
        return {"name": name, **self.fields(options, types, path, special)}

    def options_of_part(
        self, name: str
    ) -> tuple[dict[str, Any], dict[str, Callable[[Any, str], Any]]]:
        """Return the types of a part's options, and checks for those that are methods or parts."""
        kind = methods.part_class(name)
        special: dict[str, Callable[[Any, str], Any]] = {
            option: partial(self.part, slot=inner)
            if isinstance(inner, str)
            else self.method_options
            for option, inner in methods.nested_in(kind).items()
        }
        return types_of(kind), special

    def guard(self, given: Any, path: str) -> dict[str, Any] | None:
        """Check the guard of a method, if it has one."""
        return None if given is None else self.part(given, path)

    def data(self, given: Any, seed: int) -> dict[str, Any]:
        """Check the options of the data, and add the defaults."""
        name, options = self.named(given, "data", "data", data.SOURCES)
        recipe = data.recipe_of(name)
        types = types_of(data.load) | types_of(recipe)
        special = {"partition": self.partition}
        checked = self.fields(options, types, "data", special, of=f"data {name!r}")
        defaults = defaults_of(data.load) | defaults_of(recipe) | {"seed": seed}
        for option, default in UNLESS_GIVEN.items():
            if option in defaults and defaults[option] == default:
                defaults.pop(option)
        return {"name": name, **defaults, **checked}

    def partition(self, given: Any, path: str) -> dict[str, Any] | None:
        """Check the partition of the data and its options."""
        if given is None:
            return None
        name, options = self.named(given, path, "partition", data.PARTITIONS)
        checked = self.fields(options, types_of(data.PARTITIONS[name]), path)
        with self.origins.named("data"), naming(below(path, checked)):
            made: Any = data.make_partition(name, **checked)
        return {"name": name, **dataclasses.asdict(made)}

    def model(self, given: Any, usual: str) -> dict[str, Any]:
        """Check the options of the model, and add the defaults."""
        name, options = self.named(given, "model", "model", models.MODELS, default=usual)
        types = types_of(models.maker_of(name))
        checked = self.fields(options, types, "model", of=f"model {name!r}")
        return {"name": name, **models.defaults(name), **checked}

    def training(self, content: Mapping[str, Any], without: Sequence[str] = ()) -> Training:
        """Make the training settings, without some keys if these are checked later."""
        given = content.get("training", {})
        if without and isinstance(given, Mapping):
            given = {key: value for key, value in given.items() if key not in without}
        made: Training = self.settings(
            Training,
            {"training": given},
            "training",
            optimizer=self.optimizer,
            schedule=self.schedule,
            augment=self.augmentations,
            loss=self.loss,
        )
        return made

    def settings(
        self,
        kind: type[Any],
        content: Mapping[str, Any],
        section: str,
        **special: Callable[[Any, str], Any],
    ) -> Any:
        """Make the settings of a section. The values in ``special`` have checks of their own."""
        checked = self.fields(content.get(section, {}), types_of(kind), section, special)
        with self.origins.named(section):
            return kind(**checked)

    def optimizer(self, given: Any, path: str) -> Any:
        """Make an optimizer from its name and options."""
        name, options = self.named(given, path, default="sgd")
        if name in _OPTIMIZERS:
            types = types_of(_OPTIMIZERS[name])
            types.pop("decoupled", None)
            options = self.fields(options, types, path)
        with self.origins.named("training"), keyed(path, options):
            return optimizer_from({"name": name, **_read_scientific(options)})

    def loss(self, given: Any, path: str) -> Any:
        """Make the loss that replaces that of the task, if there is one."""
        if given is None:
            return None
        name, options = self.named(given, path, "loss", LOSSES)
        make: Any = LOSSES[name].make
        checked = self.fields(options, types_of(make) if isinstance(make, type) else {}, path)
        with self.origins.named("training"):
            return loss_from({"name": name, **checked})

    def privacy(self, given: Any, path: str) -> Any:
        """Make the settings of differential privacy, if there are any."""
        if given is None:
            return None
        checked = self.fields(given, types_of(Privacy), path)
        if "clip" not in checked:
            raise InputError(
                f"{self.origins.of(path)}: {path} needs clip, the largest norm of an update"
            )
        with self.origins.named("flower"):
            return Privacy(**checked)

    def start(self, given: Any) -> Start | None:
        """Return where the initial model comes from, if not from the seed."""
        if given is None:
            return None
        types = {"path": str, "parts": str | list[str]}
        checked = self.fields({"path": given} if isinstance(given, str) else given, types, "start")
        with self.origins.named("start"):
            return start_from(checked)

    def schedule(self, given: Any, path: str) -> Any:
        """Make a schedule of the learning rate."""
        fields = {"kind": given} if isinstance(given, str) else given
        checked = self.fields(fields, types_of(Schedule), path)
        with self.origins.named("training"):
            return schedule_from(checked)

    def fine_tune(self, given: Any, path: str) -> FineTune | None:
        """Make the settings of fine-tuning, if there are any."""
        if given is None:
            return None
        checked = self.fields(given, types_of(FineTune), path)
        with self.origins.named("evaluation"):
            return FineTune(**checked)

    def metrics(self, given: Any, path: str) -> tuple[Metric, ...]:
        """Return metrics from their names."""
        listed = self.value([given] if isinstance(given, str) else given, list[str], path)
        with self.origins.named("evaluation"):
            return several_from(listed, path)

    def tracking(self, given: Any) -> tuple[dict[str, Any], ...]:
        """Check the trackers and their options."""
        made = []
        for item in given if isinstance(given, list) else [given]:
            name, options = self.named(item, "tracking", "tracker", tracking.TRACKERS)
            made.append(
                {
                    "name": name,
                    **self.fields(options, types_of(tracking.tracker_of(name)), "tracking"),
                }
            )
        return tuple(made)

    def augmentations(self, given: Any, path: str) -> Any:
        """Make augmentations from their names and options."""
        made = []
        for item in self.value(given, list[Any], path):
            name, options = self.named(item, path, "augmentation", AUGMENTATIONS)
            checked = self.fields(options, types_of(AUGMENTATIONS[name]), path)
            with self.origins.named("training"):
                made.append(augmentation_from({"name": name, **checked}))
        return tuple(made)

    def named(
        self,
        given: Any,
        path: str,
        kind: str = "",
        valid: Sequence[str] | Mapping[str, Any] | None = None,
        *,
        default: str | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Split a name, or a mapping with a name, into name and options."""
        options = {"name": given} if isinstance(given, str) else given
        if isinstance(options, Mapping) and default is not None:
            options = {"name": default, **options}
        if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
            hint = f"; valid names: {', '.join(valid)}" if valid else ""
            raise InputError(
                f"{self.origins.of(path)}: {path} must be a name or a mapping with a name, got "
                f"{represented(given)}{hint}"
            )
        options = dict(options)
        name = options.pop("name")
        if valid is not None and name not in valid:
            origin = self.origins.of(f"{path}.name")
            raise unknown(
                kind, name, valid, where=origin if kind == path else f"{path} of {origin}"
            )
        return name, options

    def fields(
        self,
        given: Any,
        types: Mapping[str, Any],
        path: str,
        special: Mapping[str, Callable[[Any, str], Any]] | None = None,
        *,
        of: str | None = None,
    ) -> dict[str, Any]:
        """Check the values of a mapping one by one. Messages say what the keys are options of."""
        if not isinstance(given, Mapping):
            raise InputError(
                f"{self.origins.of(path)}: {path} must hold keys with values, got "
                f"{represented(given)}"
            )
        special = special or {}
        checked = {}
        for key, value in given.items():
            inner = f"{path}.{key}"
            if key not in types:
                if not types:
                    raise InputError(
                        f"unknown key {inner!r} in {self.origins.of(inner)}; there are no options "
                        "here"
                    )
                valid = [f"{path}.{name}" for name in types]
                raise unknown_key(inner, valid, where=self.origins.of(inner), of=of)
            checked[key] = (
                special[key](value, inner)
                if key in special
                else self.value(value, types[key], inner)
            )
        return checked

    def value(self, given: Any, kind: Any, path: str) -> Any:
        """Check one value strictly, but accept whole numbers as floats, and text such as 1e-3.

        YAML reads 1e-3 as text.
        """
        adapter = TypeAdapter(kind, config=ConfigDict(strict=True))
        for candidate in (given, _read_scientific(given)):
            try:
                # As JSON, because there a list is accepted as a tuple even with strict types.
                return adapter.validate_json(json.dumps(candidate))
            except (ValueError, TypeError, RecursionError):
                # A ValidationError is a ValueError. Numbers with too many digits raise one as well.
                continue
        note = (
            " (YAML reads yes, no, on and off as true and false)" if isinstance(given, bool) else ""
        )
        raise InputError(
            f"{self.origins.of(path)}: {path} must be {in_words(kind)}, got "
            f"{represented(given)}{note}"
        )


def _read_scientific(value: Any) -> Any:
    """Convert text such as ``1e-3`` to a number, also inside lists and mappings.

    YAML does not read it as a number.
    """
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_read_scientific(item) for item in value]
    if isinstance(value, dict):
        return {key: _read_scientific(item) for key, item in value.items()}
    return value
