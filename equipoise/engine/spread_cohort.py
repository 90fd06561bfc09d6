"""The cohort of a run in several processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from equipoise.engine.cohort import StackedCohort
from equipoise.engine.evaluation import Measured
from equipoise.engine.spread_answers import Answers
from equipoise.errors import InputError
from equipoise.method import LocalRule, Reports
from equipoise.tree import Tree

if TYPE_CHECKING:
    from equipoise.engine.spread import SpreadEngine


class SpreadCohort(StackedCohort):
    """The clients of one round, in several processes.

    Parameters
    ----------
    spread : SpreadEngine
        What divides clients among processes.
    plain : StackedCohort
        The same cohort in one process. Whatever concerns the server is taken from it.
    """

    def __init__(self, spread: SpreadEngine, plain: StackedCohort) -> None:
        vars(self).update(vars(plain))
        self.spread = spread

    def launch(
        self, shared: Mapping[str, Tree], each: Mapping[str, Tensor], local: LocalRule
    ) -> tuple[Tree, dict[str, Tree], Callable[[], Reports]]:
        """Train all clients, each in its process, and wait for them."""
        if local != self.method.local:
            raise InputError(
                "with several processes, cohort.train takes the method's own local rule only, got "
                f"{local!r}"
            )
        work = np.asarray(sum(self.work_of(local), np.zeros_like(self.sizes)))
        batch = np.minimum(self.sizes, self.engine.training.batch_size)
        answers = self.spread.carry_out(
            "train",
            self.ids,
            self.spread.divided(self.ids, work * batch),
            each,
            shared=dict(shared),
            round_=self.round,
            wanted=sorted(self.wanted_reports),
            evaluates_local=self.evaluates_local,
        )
        sent, uploads, reports, local_metrics = (
            answers.changed(lambda found, count, part=part: found[part])  # type: ignore[misc]
            for part in range(4)
        )
        self.local_metrics = {
            split: local_metrics.measured(itemgetter(split)) for split in local_metrics.given[0][1]
        }
        return (
            sent.tree(lambda found: found),
            {name: uploads.tree(itemgetter(name)) for name in uploads.given[0][1]},
            lambda: reports.tree(lambda found: found),
        )

    def measured(self, params: Tree, split: str) -> Measured:
        """Return loss and metrics of a model on the clients' own split."""
        answers = self._asked_of_all(split, "measure", params=params)
        return answers.measured(lambda found: found)

    def answers(
        self,
        question: str,
        args: Sequence[Any],
        model: Tree | None,
        split: str,
        rows: Mapping[str, Tensor],
    ) -> Any:
        """Return the clients' answers to a question, stacked in the order of ``ids``."""
        answers = self._asked_of_all(split, "ask", rows, question=question, args=args, model=model)
        flat, form = tree_flatten(answers.given[0][1])
        said = answers.changed(lambda found, count: tree_flatten(found)[0])
        leaves = [said.stack(itemgetter(leaf)) for leaf in range(len(flat))]
        return tree_unflatten(leaves, form)

    def _asked_of_all(
        self, split: str, task: str, rows: Mapping[str, Tensor] | None = None, **common: Any
    ) -> Answers:
        work = self.engine.view.split(split).sizes[self.ids] + 1
        processes = self.spread.divided(self.ids, work)
        return self.spread.carry_out(
            task, self.ids, processes, rows, split=split, round_=self.round, **common
        )
