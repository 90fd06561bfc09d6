"""The page ``docs/settings.md``."""

from __future__ import annotations

import textwrap

from equipoise.explain.keys import Setting, settings

_PAGES = {
    "": (
        "Keys of an experiment",
        "An experiment is a YAML file with these keys, or a mapping in Python.",
    ),
    "training": (
        "`training`",
        "How clients train, for all methods. In Python: `equipoise.Training`.",
    ),
    "training.optimizer": (
        "`training.optimizer`",
        "Other optimizers of `torch.optim` take their own options.",
    ),
    "training.schedule": ("`training.schedule`", "A single name is the kind: `schedule: cosine`."),
    "training.augment": ("`training.augment`", "`flip` mirrors images and has no options."),
    "evaluation": (
        "`evaluation`",
        "When clients are evaluated, and which round is reported. In Python: "
        "`equipoise.Evaluation`.",
    ),
    "evaluation.fine_tune": ("`evaluation.fine_tune`", ""),
    "machine": ("`machine`", "Device and precision. In Python: `equipoise.Machine`."),
    "data": (
        "`data`",
        "The source of the data, and which client has which samples. In Python: "
        "`equipoise.data.load`.",
    ),
    "data.partition": (
        "`data.partition`",
        "How the samples of a source are divided among clients.",
    ),
    "start": ("`start`", "A single value is the path: `start: runs/first`."),
    "flower": ("`flower`", "For runs on Flower. In one process these keys have no effect."),
    "flower.privacy": ("`flower.privacy`", ""),
    "study": ("Keys of a study", "A study is a YAML file for `equipoise compare`."),
    "methods": (
        "`methods`",
        "A method in the list may have these keys beside its name and its hyper-parameters.",
    ),
    "tuning": ("`tuning`", "How `equipoise compare --tune` chooses between the values of grids."),
}


def page() -> str:
    """Return ``docs/settings.md``.

    Examples
    --------
    >>> page().splitlines()[0]
    '# Settings'
    """
    lines = [
        "# Settings",
        "",
        *_wrapped(
            "Every key of experiments and studies, with the values that are valid, the default, "
            "and an example. `equipoise explain training.schedule` prints the same in a terminal. "
            "`equipoise explain ditto` prints the options of the method `ditto`, and `equipoise "
            "explain cnn2` those of the model `cnn2`; [models.md](models.md) lists the models. "
            "This page is made from the code: `equipoise explain --markdown > docs/settings.md`."
        ),
    ]
    shown: dict[str, dict[str, list[Setting]]] = {}
    for setting in settings():
        section = setting.key.rpartition(".")[0] or ("study" if setting.of == "studies" else "")
        shown.setdefault(section, {}).setdefault(
            "" if setting.of == "studies" else setting.of, []
        ).append(setting)
    # A section without a title is shown under its name.
    for section in [
        *(name for name in _PAGES if name in shown),
        *(name for name in shown if name not in _PAGES),
    ]:
        title, about = _PAGES.get(section, (f"`{section}`", ""))
        lines += ["", f"## {title}", *(["", *_wrapped(about)] if about else [])]
        for of, group in shown[section].items():
            names = ", ".join(f"`{name}`" for name in of.split(", "))
            lines += ["", *([f"### With {names}", ""] if of else [])]
            for setting in group:
                lines += _wrapped(f"- {_words(setting)}", "  ")
    return "\n".join(lines) + "\n"


def _words(setting: Setting) -> str:
    default = (
        "needed"
        if setting.default is None
        else f"default `{setting.default}`"
        if setting.default
        else "no default"
    )
    return (
        f"**`{setting.key}`**: {setting.kind}; {default}. {setting.meaning} "
        f"Example: `{setting.example}`"
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
