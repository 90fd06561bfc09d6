"""Updates of some clients or with other rows: what is copied when, and sums without a copy."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from equipoise.errors import InputError
from equipoise.exchange import Updates, mix, mix_tree
from equipoise.stacks import weighted_sums
from tests.allocations import Largest

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
    with pytest.raises(InputError, match=f"{count} weights for a stack of 3 clients"):
        mix(updates_of_five().of(CHOSEN), torch.ones(count))


# ---- rows that are replaced ----------------------------------------------------------------------

REPLACED = np.array([False, False, True, False, True])
OF_FIVE = torch.tensor([0.1, 0.2, 0.3, 0.15, 0.25], dtype=torch.float64)


def new_rows(dtype=torch.float32):
    """Other rows of two clients, of everything except the reports and one parameter."""
    two = updates_of_five(dtype).of(np.array([True, True, False, False, False]))
    params = {"w": -3 * two.params["w"]}
    buffers, uploads = {"mean": 2 * two.buffers["mean"]}, {"c": {"w": 5 * two.uploads["c"]["w"]}}
    return Updates(params, buffers, uploads, {})


def written_anew(updates, rows):
    """The same updates, with all rows in new memory."""

    def whole(tree, new):
        made = {name: stack.clone() for name, stack in tree.items()}
        for name, stack in new.items():
            made[name][torch.from_numpy(REPLACED)] = stack
        return made

    return Updates(
        whole(updates.params, rows.params),
        whole(updates.buffers, rows.buffers),
        {name: whole(tree, rows.uploads[name]) for name, tree in updates.uploads.items()},
        whole(updates.reports, rows.reports),
    )


def same_bits(found, wanted):
    """Assert that trees have the same names in the same order, and the same bits."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("zeros", [[], [0], [2], [1, 4], [2, 4], [0, 1, 3], [0, 1, 2, 3, 4]])
def test_sums_over_replaced_rows_have_the_bits_of_sums_of_copies(dtype, zeros):
    updates, rows, weights = updates_of_five(dtype), new_rows(dtype), OF_FIVE.clone()
    weights[zeros] = 0
    replaced, copies = updates.with_rows(REPLACED, rows), written_anew(updates, rows)
    same_bits(mix(replaced, weights), mix(copies, weights))
    same_bits(mix(replaced, weights, upload="c"), mix(copies, weights, upload="c"))
    # Nothing was written to the clients' own rows.
    same_bits(rows_of(updates), rows_of(updates_of_five(dtype)))


def test_replaced_rows_that_are_read_are_those_of_a_copy():
    updates, rows = updates_of_five(), new_rows()
    replaced = updates.with_rows(REPLACED, rows)
    same_bits(rows_of(replaced), rows_of(written_anew(updates, rows)))
    same_bits(rows_of(updates), rows_of(updates_of_five()))
    # What does not change is not copied.
    assert replaced.params["b"] is updates.params["b"]
    assert replaced.params["w"] is not updates.params["w"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e300])
def test_numbers_that_were_replaced_do_not_matter(value):
    updates, rows = updates_of_five(torch.float64), new_rows(torch.float64)
    wanted = mix(updates.with_rows(REPLACED, rows), OF_FIVE)
    for stack in (updates.params["w"], updates.buffers["mean"]):
        stack[torch.from_numpy(REPLACED)] = value
    same_bits(mix(updates.with_rows(REPLACED, rows), OF_FIVE), wanted)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("client", [1, 2])
def test_a_client_with_weight_zero_does_not_matter_whether_it_is_replaced_or_not(client, value):
    updates, rows, weights = updates_of_five(), new_rows(), OF_FIVE.clone()
    weights[client] = 0
    wanted = mix(updates.with_rows(REPLACED, rows), weights)
    (rows.params["w"][0] if client == 2 else updates.params["w"][1]).fill_(value)
    same_bits(mix(updates.with_rows(REPLACED, rows), weights), wanted)
    # With a weight it does.
    assert not bool(mix(updates.with_rows(REPLACED, rows), OF_FIVE)["w"].isfinite().any())


@pytest.mark.parametrize("read", [(), ("reports",), ("params", "uploads")])
def test_some_of_the_clients_of_updates_with_replaced_rows(read):
    updates, rows = updates_of_five(), new_rows()
    replaced = updates.with_rows(REPLACED, rows)
    for field in read:
        getattr(replaced, field)
    chosen, wanted = replaced.of(CHOSEN), written_anew(updates, rows).of(CHOSEN)
    for upload in (None, "c"):
        same_bits(mix(chosen, WEIGHTS, upload), mix(wanted, WEIGHTS, upload))
    same_bits(rows_of(chosen), rows_of(wanted))


def test_rows_of_some_of_the_clients_are_replaced():
    everyone = updates_of_five()
    one = Updates({"w": torch.ones(1, 3, 50_001)}, {}, {"c": {}}, {})
    found = everyone.of(CHOSEN).with_rows(np.array([False, True, False]), one)
    everyone.params["w"][2] = 1
    same_bits(mix(found, WEIGHTS), mix(everyone.of(CHOSEN), WEIGHTS))
    same_bits(rows_of(found), rows_of(everyone.of(CHOSEN)))


def test_rows_are_replaced_twice():
    updates, rows = updates_of_five(), new_rows()
    last = Updates({"b": torch.tensor([7.0])}, {}, {"c": {}}, {})
    replaced = updates.with_rows(REPLACED, rows)
    again = replaced.with_rows(np.array([False, False, False, False, True]), last)
    wanted = written_anew(updates, rows)
    wanted.params["b"][4] = 7
    same_bits(mix(again, OF_FIVE), mix(wanted, OF_FIVE))
    same_bits(rows_of(again), rows_of(wanted))


def test_a_replaced_tree_of_updates_with_replaced_rows_is_summed():
    replaced = updates_of_five().with_rows(REPLACED, new_rows())
    changed = replace(replaced, params={"v": torch.ones(5, 2)})
    assert changed.param_names == ["v"]
    assert mix(changed, OF_FIVE)["v"].tolist() == [1.0, 1.0]
    assert torch.equal(mix(changed, OF_FIVE)["mean"], mix(replaced, OF_FIVE)["mean"])


@pytest.mark.parametrize("field", ["params", "buffers", "uploads"])
def test_rows_that_were_read_and_changed_are_summed(field):
    replaced = updates_of_five().with_rows(REPLACED, new_rows())
    trees = replaced.uploads if field == "uploads" else {None: getattr(replaced, field)}
    for tree in trees.values():
        for stack in tree.values():
            stack.zero_()
    for upload, tree in trees.items():
        assert not any(bool(mix(replaced, OF_FIVE, upload)[name].any()) for name in tree)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_every_client_needs_one_weight_if_rows_are_replaced(count):
    with pytest.raises(InputError, match=f"{count} weights for a stack of 5 clients"):
        mix(updates_of_five().with_rows(REPLACED, new_rows()), torch.ones(count))


def test_an_unknown_tree_of_uploads_is_refused():
    for updates in (updates_of_five(), updates_of_five().with_rows(REPLACED, new_rows())):
        with pytest.raises(KeyError, match="d"):
            mix(updates, OF_FIVE, upload="d")


# ---- memory --------------------------------------------------------------------------------------


def test_names_of_parameters_need_no_copy():
    everyone = updates_of_five()
    for updates in (everyone.of(CHOSEN), everyone.with_rows(REPLACED, new_rows())):
        everyone_there = np.ones(len(updates.reports["train_loss"]), dtype=bool)
        assert updates.of(everyone_there).param_names == updates.param_names == ["w", "b"]
        assert "params" not in vars(updates)


def test_sums_with_weights_of_zero_need_no_memory_for_whole_rows():
    rows = torch.ones(10, 1 << 20)
    weights = torch.full((10,), 0.125, dtype=torch.float64)
    weights[[3, 7]] = 0
    with Largest() as largest:
        (found,) = weighted_sums([rows], weights)
    assert bool((found == 1).all())
    # The sum in float64.
    assert largest.bytes == 8 << 20


@pytest.mark.parametrize("zeros", [[], [0], [3, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_replaced_rows_need_no_memory_for_whole_rows(zeros, dtype):
    updates = Updates({"w": torch.full((10, 1 << 20), 3, dtype=dtype)}, {}, {"c": {}}, {})
    rows = Updates({"w": torch.ones(2, 1 << 20, dtype=dtype)}, {}, {"c": {}}, {})
    which = np.isin(np.arange(10), [3, 8])
    weights = torch.full((10,), 0.125, dtype=torch.float64)
    weights[zeros] = 0
    wanted = 0.125 * sum(1 if which[k] else 3 for k in range(10) if k not in zeros)
    with Largest() as largest:
        found = mix(updates.with_rows(which, rows), weights)["w"]
    assert bool((found == wanted).all())
    # The sum in float64.
    assert largest.bytes == 8 << 20
    # Rows that are read do need it.
    with Largest() as largest:
        updates.with_rows(which, rows).params["w"].sum()
    assert largest.bytes == 10 * dtype.itemsize << 20


@pytest.mark.parametrize("weights", [[0.25, 0.75], (0.25, 0.75), np.array([0.25, 0.75])], ids=repr)
def test_weights_may_be_any_numbers(weights):
    two = Updates({"w": torch.tensor([[1.0], [5.0]])}, {"m": torch.tensor([0.0, 8.0])}, {}, {})
    assert mix(two, weights) == {"w": torch.tensor([4.0]), "m": torch.tensor(6.0)}
    assert mix_tree(two.params, weights) == {"w": torch.tensor([4.0])}
    chosen = two.of(np.array([False, True]))
    assert mix(chosen, [0.5])["w"] == 2.5


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.25, 0.25], "there are 3 weights for a stack of 2 clients; valid: one weight per"),
        ({"a": 0.5, "b": 0.5}, "weights are {'a': 0.5, 'b': 0.5}; valid: one number per client"),
        (["a", "b"], "weights are ['a', 'b']; valid: one number per client"),
        (None, "weights are None; valid: one number per client"),
        (0.5, "weights have the shape (); valid: one number per client"),
        (torch.ones(2, 1), "weights have the shape (2, 1); valid: one number per client"),
    ],
)
def test_weights_that_are_not_one_number_per_client_are_refused(weights, message):
    two = Updates({"w": torch.ones(2, 1)}, {}, {}, {})
    for sums in (lambda: mix(two, weights), lambda: mix_tree(two.params, weights)):
        with pytest.raises(InputError, match=re.escape(message)):
            sums()


def test_a_report_that_was_not_requested_is_explained():
    two = Updates({}, {}, {}, {"train_loss": torch.tensor([1.0, 2.0])})
    for updates in (two, two.of(np.array([True, False])), replace(two, uploads={})):
        assert updates.reports["train_loss"][0] == 1
        assert updates.reports.get("loss_before") is None
        with pytest.raises(
            InputError, match=r"has no 'loss_before', because .* needs = \('loss_be"
        ):
            updates.reports["loss_before"]
        with pytest.raises(InputError, match="unknown report 'trainloss' .* mean 'train_loss'"):
            updates.reports["trainloss"]
