"""Studies: methods by settings by seeds, run as far as they are missing, and their tables.

A study file holds ``base`` (an experiment without method and seed), ``methods``, ``settings``
(labels with what they change), ``seeds``, ``metrics`` and the ``split`` they are of. Its runs are
in ``OUT/<setting>/<method>/seed<k>``, and run seed by seed; starting a study again runs what is
missing and resumes what was interrupted. If one of these directories holds another experiment, as
after changes to the study, nothing runs.

If ``data.leave_out`` is a list of groups, each of them is left out once. These settings are called
folds. Tables of the mean over folds and of the differences from a ``baseline`` method, paired over
folds and seeds, are added.

A method may have ``set`` beside its hyper-parameters: other settings that are different for it,
such as the number of epochs.

A method may have a ``grid`` beside its hyper-parameters: values to try for some of them. It is used
only for tuning. Then every combination is a separate method, runs with the seed of ``tuning``, and
is evaluated on validation data, together with the study's first method; see :class:`Tuning`. What
was chosen is written to ``chosen.yaml`` beside the runs of tuning, and is what the study then runs.

Seeds, methods and settings can be added to a finished study: starting it again runs what is new.
"""

from __future__ import annotations

from equipoise.study.choice import Choice, read_choices
from equipoise.study.metrics import model_of, value_of
from equipoise.study.plan import Job, Study, Tuning
from equipoise.study.reading import load_study, study_from
from equipoise.study.results import Results

__all__ = [
    "Choice",
    "Job",
    "Results",
    "Study",
    "Tuning",
    "load_study",
    "model_of",
    "read_choices",
    "study_from",
    "value_of",
]
