"""Studies: methods by settings by seeds, run as far as they are missing, and their tables.

A study file holds ``base`` (an experiment without method and seed), ``methods``, ``settings`` (labels with what they
change), ``seeds``, ``metrics`` and the ``split`` they are of. Its runs are in ``OUT/<setting>/<method>/seed<k>``; starting
a study again runs what is missing, goes on with what was broken off and leaves alone what is done. Where one of these
directories holds another experiment, as after changes to the study, nothing runs at all.

A method may have a ``grid`` beside its hyper-parameters: values to try for some of them. A study ignores it until it is
tuned. Then every combination is a method of its own, runs with the one seed of ``tuning``, and is judged by validation
data, beside the study's first method; see :class:`Tuning`.
"""

from __future__ import annotations

from equipoise.study.metrics import model_of, value_of
from equipoise.study.plan import Job, Study, Tuning
from equipoise.study.reading import load_study, study_from
from equipoise.study.results import Results

__all__ = ["Job", "Results", "Study", "Tuning", "load_study", "model_of", "study_from", "value_of"]
