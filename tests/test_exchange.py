"""Updates of some of the clients: what is copied and when, and sums without a copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.exchange import Updates, mix
from equipoise.stacks import weighted_sums

CHOSEN = np.array([True, False, True, True, False])
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def updates_of_five(dtype=torch.float32):
    """Updates with more numbers than are summed at a time, for all rows and for three of them."""
    draws = torch.Generator().manual_seed(0)

    def stack(*shape):
        return torch.randn(5, *shape, generator=draws, dtype=dtype)

    return Updates(
        {"w": stack(3, 50_001), "b": stack()},
        {"mean": stack(7)},
        {"c": {"w": stack(4)}},
        {"train_loss": stack().double()},
    )


def rows_of(updates):
    """Everything in updates, by name."""
    uploads = {f"c.{name}": stack for name, stack in updates.uploads["c"].items()}
    return {**updates.params, **updates.buffers, **uploads, **updates.reports}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_without_a_copy_have_the_bits_of_sums_of_copies(dtype):
    everyone = updates_of_five(dtype)
    copies = Updates(
        *(
            {name: stack[torch.from_numpy(CHOSEN)] for name, stack in tree.items()}
            for tree in (everyone.params, everyone.buffers)
        ),
        {},
        {},
    )
    wanted = mix(copies, WEIGHTS)
    found = mix(everyone.of(CHOSEN), WEIGHTS)
    assert list(found) == list(wanted) == ["w", "b", "mean"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e300])
def test_numbers_of_other_clients_do_not_matter(value):
    everyone = updates_of_five(torch.float64)
    wanted = mix(everyone.of(CHOSEN), WEIGHTS)
    for stack in (*everyone.params.values(), *everyone.buffers.values()):
        stack[torch.from_numpy(~CHOSEN)] = value
    found = mix(everyone.of(CHOSEN), WEIGHTS)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_chosen_client_with_weight_zero_does_not_matter_either():
    everyone = updates_of_five()
    everyone.params["b"][2] = torch.inf
    weights = torch.tensor([0.25, 0.0, 0.75])
    wanted = 0.25 * everyone.params["b"][0] + 0.75 * everyone.params["b"][3]
    torch.testing.assert_close(mix(everyone.of(CHOSEN), weights)["b"], wanted)


def test_rows_that_are_read_are_copies_of_their_own():
    everyone, before = updates_of_five(), rows_of(updates_of_five())
    chosen = everyone.of(CHOSEN)
    for name, stack in rows_of(chosen).items():
        assert torch.equal(stack, before[name][torch.from_numpy(CHOSEN)])
        stack.zero_()
    assert all(torch.equal(stack, before[name]) for name, stack in rows_of(everyone).items())
    # They are copied once, so changes of them last.
    assert not any(bool(stack.any()) for stack in rows_of(chosen).values())


def test_a_later_change_of_the_choice_does_not_matter():
    which = CHOSEN.copy()
    chosen = updates_of_five().of(which)
    which[:] = False
    assert len(chosen.params["b"]) == 3


@pytest.mark.parametrize("read", ["params", "buffers"])
def test_rows_that_were_changed_are_those_that_are_summed(read):
    chosen = updates_of_five().of(CHOSEN)
    for stack in getattr(chosen, read).values():
        stack.zero_()
    found = mix(chosen, WEIGHTS)
    assert not any(bool(found[name].any()) for name in getattr(chosen, read))


def test_replaced_trees_are_those_that_are_summed():
    chosen = updates_of_five().of(CHOSEN)
    changed = replace(chosen, params={"w": torch.ones(3, 2)})
    assert mix(changed, WEIGHTS)["w"].tolist() == [1.0, 1.0]
    assert changed.params["w"].shape == (3, 2)
    assert torch.equal(mix(changed, WEIGHTS)["mean"], mix(chosen, WEIGHTS)["mean"])
    assert torch.equal(changed.reports["train_loss"], chosen.reports["train_loss"])


def test_some_of_some_of_the_clients():
    everyone = updates_of_five()
    last_two = everyone.of(CHOSEN).of(np.array([False, True, True]))
    weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
    wanted = mix(everyone.of(np.array([False, False, True, True, False])), weights)
    found = mix(last_two, weights)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert torch.equal(last_two.params["b"], everyone.params["b"][2:4])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_chosen_client_needs_one_weight(count):
    with pytest.raises(IndexError, match=f"{count} weights for a stack of 3 clients"):
        mix(updates_of_five().of(CHOSEN), torch.ones(count))


class Largest(TorchDispatchMode):
    """Note the bytes of the largest tensor in new memory."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not function.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def test_sums_with_weights_of_zero_need_no_memory_for_whole_rows():
    rows = torch.ones(10, 1 << 20)
    weights = torch.full((10,), 0.125, dtype=torch.float64)
    weights[[3, 7]] = 0
    with Largest() as largest:
        (found,) = weighted_sums([rows], weights)
    assert bool((found == 1).all())
    # The sum in float64.
    assert largest.bytes == 8 << 20
