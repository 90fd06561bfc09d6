"""Scripts of the experiments, which are not modules of the package."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location


def load_script(path):
    """Import a script by its path."""
    spec = spec_from_file_location(path.stem, path)
    module = module_from_spec(spec)
    # Dataclasses look up their module there.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
