"""Where a pretrained model comes from: its files in a directory or on the Hugging Face hub.

``transformers`` is imported when the first of them is loaded, and never otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from equipoise.errors import InputError, few, unknown

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of each channel of ImageNet, for models without their own."""

# Not "eager", which computes softmax in float32 even if everything else is float64. Inside
# ``plain_attention`` this one uses plain matrix products, too.
SDPA = {"attn_implementation": "sdpa"}
# A name on the hub is "name" or "owner/name". Anything else must be a path.
_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_VALID = (
    "a directory with config.json and model.safetensors, or a name on the Hugging Face hub such as "
    "'facebook/dinov2-small'"
)


@dataclass(frozen=True)
class Source:
    """The description of a pretrained model from its files.

    Attributes
    ----------
    name : str
        The directory or name that was given.
    user : str
        What it is used for, for messages.
    place : str
        Its directory, or its name on the hub.
    config : dict
        The content of ``config.json``.
    mean, std : tuple of float
        Normalisation of images, for each channel.
    """

    name: str
    user: str
    place: str
    config: dict[str, Any]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, source: str, user: str, kinds: Collection[str]) -> Source:
        """Read the description of a source, which must be one of some kinds."""
        if not isinstance(source, str) or not source:
            raise InputError(f"source of {user} must be text, got {source!r}; valid: {_VALID}")
        path = Path(source).expanduser()
        if path.is_dir():
            place, files = str(path), partial(_local, path)
        elif beside := _models_in(path.parent):
            # The name of a model is misspelt. The hub need not be asked, which takes long offline.
            raise InputError(
                f"source {source!r} of {user} does not exist; the models in {path.parent} are "
                f"{few(beside)}"
            )
        elif _ON_HUB.fullmatch(source):
            place, files = source, partial(_remote, source)
        else:
            raise InputError(f"source {source!r} of {user} is not a directory; valid: {_VALID}")
        config = cls._read(files, "config.json", source, user)
        if config is None:
            raise InputError(f"source {source!r} of {user} has no config.json; valid: {_VALID}")
        if config.get("model_type") not in kinds:
            where = f"config.json of source {source!r} of {user}"
            raise unknown("model type", config.get("model_type"), kinds, where=where)
        processing = cls._read(files, "preprocessor_config.json", source, user) or {}
        mean, std = (
            processing.get(key) or usual
            for key, usual in zip(("image_mean", "image_std"), IMAGENET, strict=True)
        )
        if processing.get("do_normalize") is False:
            mean, std = (0.0,), (1.0,)
        return cls(source, user, place, config, tuple(mean), tuple(std))

    @staticmethod
    def _read(
        files: Callable[[str], Path | None], name: str, source: str, user: str
    ) -> dict[str, Any] | None:
        try:
            file = files(name)
            content = None if file is None else json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{name} of source {source!r} of {user} is not valid JSON: {error}"
            ) from error
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise InputError(
                f"source {source!r} of {user} is not a directory, and cannot be read from the "
                f"Hugging Face hub ({reason}); valid: {_VALID}"
            ) from error
        return content if content is None or isinstance(content, dict) else {}

    def also(self, name: str) -> dict[str, Any]:
        """Return the content of another file of the source, or an empty dict if it is missing."""
        folder = Path(self.place)
        files = partial(_local, folder) if folder.is_dir() else partial(_remote, self.place)
        return self._read(files, name, self.name, self.user) or {}

    @property
    def kind(self) -> str:
        """The architecture in ``config.json``."""
        kind: str = self.config["model_type"]
        return kind

    def load(self, name: str, **options: Any) -> Any:
        """Load the weights into a class of ``transformers``, in float32. All must be present."""
        transformers = library(f"source {self.name!r} of {self.user}")
        # The name of the argument until version 5.
        precision = (
            "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
        )
        # Random numbers drawn while loading must not affect later draws.
        with quiet(transformers), torch.random.fork_rng(devices=[]):
            try:
                model, outcome = getattr(transformers, name).from_pretrained(
                    self.place,
                    local_files_only=Path(self.place).is_dir(),
                    output_loading_info=True,
                    **{precision: torch.float32},
                    **options,
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"source {self.name!r} of {self.user} cannot be loaded: {reason}"
                ) from error
        if missing := sorted(outcome["missing_keys"]):
            raise InputError(
                f"source {self.name!r} of {self.user} lacks {len(missing)} weights of a {name}, "
                f"such as {missing[0]!r}; valid: {_VALID}"
            )
        return model.float()

    def tokenizer(self) -> Any:
        """Load the tokenizer of the source."""
        transformers = library(f"source {self.name!r} of {self.user}")
        folder = Path(self.place)
        valid = (
            "a source with tokenizer.json, or with vocab.json and merges.txt, as its tokenizer's "
            "save_pretrained writes"
        )
        files = ("tokenizer.json", "vocab.json", "vocab.txt")
        if folder.is_dir() and not any((folder / name).is_file() for name in files):
            raise InputError(
                f"source {self.name!r} of {self.user} has no tokenizer; valid: {valid}"
            )
        with quiet(transformers):
            try:
                return transformers.AutoTokenizer.from_pretrained(
                    self.place, local_files_only=folder.is_dir()
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = str(error).strip().partition("\n")[0]
                raise InputError(
                    f"the tokenizer of source {self.name!r} of {self.user} cannot be loaded: "
                    f"{reason}; valid: {valid}"
                ) from error


def _models_in(folder: Path) -> list[str]:
    """Return the names of the directories of models in a directory other than the working one."""
    if folder == Path() or not folder.is_dir():
        return []
    return sorted(file.parent.name for file in folder.glob("*/config.json"))


def _local(folder: Path, name: str) -> Path | None:
    return folder / name if (folder / name).is_file() else None


def _remote(source: str, name: str) -> Path | None:
    """Return a file of a model on the hub, or ``None`` if the model does not have it."""
    library(f"source {source!r}, which is not a directory,")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source, name))
    except LocalEntryNotFoundError:
        # The hub could not be reached, so a file that is not cached may exist there.
        raise
    except EntryNotFoundError:
        return None


def library(what: str) -> ModuleType:
    """Import ``transformers``."""
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{what} needs transformers: pip install 'equipoise[pretrained]'"
        ) from error
    return transformers


@contextmanager
def quiet(transformers: ModuleType) -> Iterator[None]:
    """Turn off the progress bars and the warnings about unused weights of ``transformers``."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
