"""The rows of an adopted table that the script's step uses, and their gradients.

A step's rows are one array [U, D] in ascending order of id, because torch adds gradients of repeated rows in an order
that depends on the rows' numbers: any numbering that keeps the order of ids gives the bits of the whole table.

    look_up            ids -> positions among the step's rows; rows that are not there are read and join them
    leaf               what one look-up reads: the step's rows, as a leaf of the graph
    backward           each leaf's gradient is added in the order in which torch would add it to the table's
    backward's end     the parameter shows the rows with a gradient, and their gradient
    optimizer.step()   trains the parameter (`script_optimizer.py`); its rows are written, and the next step begins
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rowcast.trainer.adopt.rows import NO_ROWS, CatchUp, Home, Records, normal_mode, positions

as_plain = torch._C.DisableTorchFunctionSubclass


class AdoptedTable:
    def __init__(self, name: str, parameter: Parameter, home: Home) -> None:
        self.name, self.parameter, self.home = name, parameter, home
        self.num_rows, self.dim = parameter.shape
        home.device = parameter.device
        self.trained_ids = self._no_rows()  # i64 [n] ascending, the rows of parameter.grad
        self.is_stepped = False  # an optimizer has used parameter.grad
        self.catch_up: CatchUp = lambda rows: None  # gives rows the steps that they have missed
        self.trained: Any = None  # of `script_optimizer.py`, once an optimizer has stepped it
        self.note: Callable[[Tensor], None] = lambda ids: None  # hears the ids of each look-up
        self.step_rows = home.read(self.trained_ids)
        self._num_changes = home.num_changes  # that the step's rows have
        self._backward: tuple[Tensor, Tensor] | None = None  # ids and gradient of the backward pass that runs
        self._first: Tensor | None = None  # the same gradient, as it is of a table that has none
        self._leaves: list[weakref.ref[Tensor]] = []  # of the step's look-ups
        self.begin_step()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.dim))

    def _no_rows(self) -> Tensor:
        return NO_ROWS.to(self.home.device)

    def begin_step(self) -> None:
        """The step has no rows yet."""
        self.ids = self._no_rows()  # i64 [U] ascending, the step's rows
        self.step_rows = self.step_rows.take(self.ids)

    def read_again(self) -> None:
        self.step_rows = self.read(self.ids)

    def see_changes(self) -> None:
        """The script may have changed the whole table since the step's rows were read."""
        self.home.take_back()
        if self._num_changes != self.home.num_changes:
            self._num_changes = self.home.num_changes
            self.read_again()

    def move(self, device: torch.device) -> None:
        """The parameter is on another device, and the step's rows follow."""
        self.home.device = device
        self.ids, self.trained_ids = self.ids.to(device), self.trained_ids.to(device)
        self.read_again()

    def whole(self) -> Records:
        """Returns all rows, with all steps: those themselves."""
        return self.home.whole(self.catch_up)

    # look-ups

    def need(self, wanted: Tensor) -> None:
        """Adds rows to the step's. `wanted`: i64 [n], distinct."""
        if wanted is self.ids:
            return
        _, known = positions(self.ids, wanted)
        missing = wanted[~known]
        if not len(self.ids):
            self.ids, self.step_rows = missing, self.read(missing)
        elif len(missing):
            found = self.read(missing)
            self.ids, order = torch.sort(torch.cat([self.ids, missing]))
            self.step_rows = self.step_rows.joined(found, order)

    def read(self, ids: Tensor) -> Records:
        rows = self.home.read(ids)
        self.catch_up(rows)
        return rows

    @normal_mode
    def place(self, ids: Tensor) -> Tensor:
        """Returns the positions of `ids` (integers, any shape) among the step's rows, i64 of the same shape.

        Raises IndexError, as torch does, for an id outside the table."""
        flat = ids.detach().reshape(-1).long().contiguous()
        self.see_changes()
        if len(self.ids) and self._is_given_up():
            self.begin_step()
        if not len(self.ids):
            self.ids, self.step_rows = self.home.planned()
            self.catch_up(self.step_rows)
        at, known = positions(self.ids, flat)
        if not bool(known.all()):
            self.need(self._checked(torch.unique(flat[~known])))
            at, _ = positions(self.ids, flat)
        return at.reshape(ids.shape)

    def _is_given_up(self) -> bool:
        """Whether no graph and no gradient is left of the step's look-ups, as after an evaluation that takes
        gradients."""
        self._leaves = [leaf for leaf in self._leaves if leaf() is not None]
        has_gradient = self.parameter.grad is not None and not self.is_stepped
        return not self._leaves and self._backward is None and not has_gradient

    def _checked(self, ids: Tensor) -> Tensor:
        if int(ids[0]) < 0 or int(ids[-1]) >= self.num_rows:
            raise IndexError(f"index out of range in self: table {self.name} has the rows 0 to {self.num_rows - 1}")
        return ids

    def peek(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a look-up without gradients: distinct rows' ids, i64 [n], their weights, f32 [n, D], and positions among
        these."""
        distinct, at = torch.unique(ids.detach().long(), return_inverse=True)
        if len(distinct):
            self._checked(distinct)
        return distinct, self.read(distinct).weights, at

    def leaf(self) -> Tensor:
        """Returns the step's rows for one look-up, f32 [U, D]."""
        ids, leaf = self.ids, self.step_rows.weights.detach()
        if not self.parameter.requires_grad:
            return leaf
        self._leaves.append(weakref.ref(leaf))
        given: list[Tensor] = []  # a sparse gradient before the leaf's own copy, which torch would add otherwise
        leaf.requires_grad_().register_hook(lambda own: given.append(own) if own.is_sparse else None)  # type: ignore[no-untyped-call]
        leaf.register_post_accumulate_grad_hook(lambda own: self._collect(ids, own, given))  # type: ignore[no-untyped-call]
        return leaf

    # gradients

    def _collect(self, ids: Tensor, leaf: Tensor, given: list[Tensor]) -> None:
        self._first, leaf.grad = leaf.grad, None
        gradient = given.pop() if given else self._first
        assert gradient is not None, "torch calls this once the gradient is there"
        with torch.no_grad():
            if self._backward is None:
                self._backward = ids, gradient
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            else:
                union, (new, old) = over_union((ids, gradient), self._backward)
                self._first = new + old
                self._backward = union, self._first  # in this order: torch keeps the entries of a sparse sum in it

    @torch.no_grad()
    def _end_backward(self) -> None:
        assert self._backward is not None, "a gradient has asked for this call"
        (ids, gradient), self._backward = self._backward, None
        with as_plain():
            before = self.parameter.grad
            if before is not None and not (self.is_stepped and is_zero(before)):
                ids, (before, gradient) = over_union((self.trained_ids, before), (ids, gradient))
                before += gradient
                self._first = before
            self.need(ids)  # an optimizer may have stepped between forward and backward
            self.trained_ids, self.is_stepped = ids, False
            self.parameter.grad = None  # it must have the shape of the data
            self.parameter.data = self.of_step(self.step_rows.weights)
            self.parameter.grad, self._first = self._first, None

    def of_step(self, own: Tensor) -> Tensor:
        """Takes those of the rows with a gradient from an array [U, ...] over the step's rows."""
        if self.trained_ids is self.ids:
            return own
        at, _ = positions(self.ids, self.trained_ids)
        return own[at]


def is_zero(gradient: Tensor) -> bool:
    return not bool((gradient._values() if gradient.is_sparse else gradient).any())


def over_union(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Two gradients [n, D], each with its ids, over the rows of either: ids, i64 [m] ascending, and both [m, D].

    A row without a gradient in one of them gets +0.0 there, as it has in a whole table's."""
    if torch.equal(first[0], second[0]):
        return first[0], (first[1], second[1])
    union = torch.unique(torch.cat([first[0], second[0]]))
    return union, (spread(union, *first), spread(union, *second))


def spread(union: Tensor, ids: Tensor, gradient: Tensor) -> Tensor:
    at, _ = positions(union, ids)
    shape = (len(union), gradient.shape[1])
    if gradient.is_sparse:
        indices = at[gradient._indices()[0]][None]
        return torch.sparse_coo_tensor(
            indices,
            gradient._values(),
            shape,
            check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
            device=gradient.device,
        )
    wider = gradient.new_zeros(shape)
    wider[at] = gradient
    return wider
