"""Studies: all combinations of methods, settings and seeds, and their tables.

A study file has ``base`` (an experiment without method and seed), ``methods``, ``settings`` (labels
and what they change), ``seeds``, ``metrics`` and ``split``, on which metrics are computed. The
directories of the runs are ``OUT/<setting>/<method>/seed<k>``. Runs are ordered by seed. Starting a
study again runs what is missing and resumes interrupted runs. If one of these directories holds
another experiment, such as after changes to the study, nothing runs.

If ``data.leave_out`` is a list of groups, each of them is left out once. These settings are called
folds. There are additional tables of the mean over folds and of the differences from a ``baseline``
method, paired over folds and seeds.

A method may have ``set`` beside its hyper-parameters: other settings that are different for this
method, such as the number of epochs.

A method may have a ``grid`` beside its hyper-parameters: values to try for some of them (``mu``,
``aggregation.t``), or for other settings (``training.optimizer.lr``), which have the same keys as
in ``set``. If the first component of a key is a key of experiments, it is that key; otherwise it is
an option of the method. ``method.NAME`` is always an option of the method. The grid is used only
for tuning. Every combination is then a separate method. It runs with the seed of ``tuning`` and is
evaluated on validation data, together with the study's first method; see :class:`Tuning`.
The chosen values are written to ``chosen.yaml`` beside the runs of tuning. The study then uses
them.

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
