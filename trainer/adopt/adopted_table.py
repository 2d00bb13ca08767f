"""The rows of an adopted table that the script's step uses, and their gradients.

A step's rows are one array [U, D] in ascending order of id, because torch adds gradients of repeated rows in an order
that depends on the rows' numbers: any numbering in the order of ids gives the bits of the whole table.

    look_up            ids -> positions among the step's rows; missing rows are read and join them
    leaf               what one look-up reads: the step's rows, as a leaf of the graph
    backward           each leaf's gradient is added in the order in which torch would add it to the table's
    backward's end     the sum is the table's gradient: the script's hooks get it, then it joins `grad`
    optimizer.step()   trains the rows of `grad` (`script_optimizer.py`); they are written, and the next step begins
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from rowcast.runtime.errors import ConfigError
from rowcast.trainer.adopt.records import NO_ROWS, WEIGHTS, alone, positions
from rowcast.trainer.adopt.row_gradient import RowGradient, Rows, as_plain, refused
from rowcast.trainer.adopt.rows import Home
from rowcast.trainer.adopt.whole_table import WholeView


class AdoptedTable:
    def __init__(self, name: str, parameter: Parameter, home: Home) -> None:
        self.name, self.parameter, self.home = name, parameter, home
        self.num_rows, self.dim = parameter.shape
        self.pid = os.getpid()
        home.device = parameter.device
        self.grad: Tensor | None = None  # [V, D]: a RowGradient, or sparse
        self.is_stepped = False  # an optimizer has used it
        self.trained: Any = None  # of `script_optimizer.py`, once an optimizer has stepped it
        self.note: Callable[[Tensor], None] = lambda ids: None  # hears the ids of each look-up
        self.arrives: Callable[[], None] = lambda: None  # hears of a backward pass: of `gradient_sum.py`, on ranks
        self.is_summed = True  # the gradient is that of all ranks
        self.step_rows = home.read(NO_ROWS.to(home.device))
        self._shown_at = NO_ROWS, 0, NO_ROWS, NO_ROWS  # of a sparse gradient, see `_shown`
        self._no_grad = torch.zeros(1, self.dim, device=parameter.device)  # of rows that were not looked up
        self._num_changes = home.num_changes  # that the step's rows have
        self._backward: tuple[Tensor, Tensor] | None = None  # ids and gradient of the backward pass that runs
        self._first: Tensor | None = None  # the same gradient, as it is of a table that has none
        self._leaves: list[weakref.ref[Tensor]] = []  # of the step's look-ups
        self.begin_step()

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_rows, self.dim))

    def begin_step(self) -> None:
        """The step has no rows yet."""
        self.ids = NO_ROWS.to(self.home.device)  # i64 [U] ascending, the step's rows
        self.step_rows = self.step_rows.each(lambda field: field.new_empty((0, *field.shape[1:])))

    def read_again(self) -> None:
        self.step_rows = self.home.read(self.ids)

    def see_changes(self) -> None:
        """Called when the script may have changed rows since the step's were read."""
        self.home.take_back()
        if self._num_changes != self.home.num_changes:
            self._num_changes = self.home.num_changes
            self.read_again()

    def move(self, device: torch.device) -> None:
        """Moves the step's rows to the parameter's new device."""
        self.home.device = device
        self.ids, self._no_grad = self.ids.to(device), self._no_grad.to(device)
        self.grad = None if self.grad is None else self.grad.to(device)
        self.read_again()

    def whole(self) -> WholeView:
        """Returns the weights of all rows after all steps, f32 [V, D] on the host: the table itself."""
        return self.home.whole(WEIGHTS).view()

    # look-ups

    def need(self, wanted: Tensor) -> None:
        """Adds rows to those of the step. `wanted`: i64 [n], distinct."""
        if wanted is self.ids:
            return
        _, known = positions(self.ids, wanted)
        missing = wanted[~known]
        if not len(self.ids):
            self.ids, self.step_rows = missing, self.home.read(missing)
        elif len(missing):
            joining = self.home.read(missing)
            self.ids, order = torch.sort(torch.cat([self.ids, missing]))
            self.step_rows = self.step_rows.joined(joining, order)

    @alone
    def place(self, ids: Tensor) -> Tensor:
        """Returns the positions of `ids` (integers, any shape) among the step's rows, i64 of the same shape.

        Raises IndexError, as torch does, for an id outside the table."""
        flat = ids.detach().reshape(-1).long().contiguous()
        self.home.seal()
        self.see_changes()
        if len(self.ids) and self._is_given_up():
            self.begin_step()
        if not len(self.ids):
            self.ids, self.step_rows = self.home.planned()
        at, known = positions(self.ids, flat)
        if not bool(known.all()):
            self.need(self._checked(torch.unique(flat[~known])))
            at, _ = positions(self.ids, flat)
        return at.reshape(ids.shape)

    def _is_given_up(self) -> bool:
        """Whether neither a graph nor a gradient of the step's look-ups is left, as after an evaluation that takes
        gradients."""
        self._leaves = [leaf for leaf in self._leaves if leaf() is not None]
        has_gradient = self.grad is not None and not self.is_stepped
        return not self._leaves and self._backward is None and not has_gradient

    def _checked(self, ids: Tensor) -> Tensor:
        if int(ids[0]) < 0 or int(ids[-1]) >= self.num_rows:
            raise IndexError(f"index out of range in self: table {self.name} has the rows 0 to {self.num_rows - 1}")
        return ids

    def peek(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For a look-up without gradients: distinct rows' ids, i64 [n], their weights, f32 [n, D], and positions among
        these."""
        distinct, at = torch.unique(ids.detach().long(), return_inverse=True)
        self.home.seal()
        if len(distinct):
            self._checked(distinct)
        return distinct, self.home.read(distinct).weights, at

    def leaf(self) -> Tensor:
        """Returns the step's rows for one look-up, f32 [U, D]."""
        ids, leaf = self.ids, self.step_rows.weights.detach()
        if not self.parameter.requires_grad:
            return leaf
        self._leaves.append(weakref.ref(leaf))
        given: list[Tensor] = []  # a sparse gradient before the leaf's own copy, which torch would add otherwise
        leaf.requires_grad_().register_hook(lambda gradient: given.append(gradient) if gradient.is_sparse else None)  # type: ignore[no-untyped-call]
        leaf.register_post_accumulate_grad_hook(lambda gradient: self._collect(ids, gradient, given))  # type: ignore[no-untyped-call]
        return leaf

    # gradients

    def _collect(self, ids: Tensor, leaf: Tensor, given: list[Tensor]) -> None:
        self._first, leaf.grad = leaf.grad, None
        gradient = given.pop() if given else self._first
        assert gradient is not None, "torch calls this once the gradient is there"
        with torch.no_grad():
            if self._backward is None:
                self._backward = ids, gradient
                self.arrives()
                torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            else:
                union, (new, old) = over_union((ids, gradient), self._backward)
                self._first = new + old
                self._backward = union, self._first  # in this order: torch keeps the entries of a sparse sum in it

    @torch.no_grad()
    def end_backward(self) -> None:
        if self._backward is None:
            return
        (ids, gradient), self._backward = self._backward, None
        first, self._first = self._first, None
        assert first is not None, "it came with the gradient"
        joins = self.grad is not None and not (self.is_stepped and is_zero(self.grad))
        given = grad = self._shown(ids, gradient if joins else first)
        with as_plain():
            hooks = [*(self.parameter._backward_hooks or {}).values()]
            ends = [*(getattr(self.parameter, "_post_accumulate_grad_hooks", None) or {}).values()]
        for hook in hooks:
            changed = hook(grad)
            grad = grad if changed is None else self.checked(changed)
        if joins:
            assert self.grad is not None
            self.grad += grad
        else:
            self.grad = grad.clone() if hooks and grad is not given else grad
        self.is_stepped = self.is_summed = False
        for end in ends:
            end(self.parameter)

    def _shown(self, ids: Tensor, gradient: Tensor) -> Tensor:
        """Returns the gradient of the table, [V, D]. `gradient`: [n, D] of rows `ids`, i64 [n] ascending."""
        if not gradient.is_sparse:
            return RowGradient(Rows(self.name, self.num_rows, ids, gradient, self._no_grad))
        at = gradient._indices()[0]
        shown = sparse_like(gradient, ids[at], self.num_rows)
        indices = shown._indices()
        self._shown_at = indices, indices._version, ids, at  # places are known while nobody changes the indices
        return shown

    def checked(self, grad: Any) -> Tensor:
        """Checks a gradient that the script assigns to the table. Raises RowcastError."""
        if isinstance(grad, Tensor) and grad.shape == self.shape and (isinstance(grad, RowGradient) or grad.is_sparse):
            return grad
        what = f"a {type(grad).__name__} of {list(grad.shape)}" if isinstance(grad, Tensor) else repr(grad)
        raise ConfigError(
            f"the adopted table {self.name} gets {what} as its gradient, which has a value for each of its "
            f"{self.num_rows:,} rows; change the gradient that is there, such as weight.grad.mul_(...), or leave the "
            f"table on the device by keep=[{self.name!r}]"
        )

    def step_gradient(self) -> tuple[Tensor, Tensor]:
        """Returns the rows that have a gradient, i64 [n] ascending, and its values, [n, D]. Raises RowcastError."""
        grad = self.grad
        if isinstance(grad, RowGradient):
            if not grad.rows.is_by_rows:
                raise refused(grad.rows, "the script has changed those of all other rows too")
            return grad.rows.ids, grad.rows.values
        assert grad is not None, "the table has a gradient"
        (rows,), (shown, version, ids, at) = grad._indices(), self._shown_at
        if rows.data_ptr() == shown.data_ptr() and len(rows) == shown.numel() and rows._version == version:
            return ids, sparse_like(grad, at, len(ids))
        ids = self.ids
        at, known = positions(ids, rows)
        if not bool(known.all()) or not len(ids):
            ids, at = torch.unique(rows, return_inverse=True)
        return ids, sparse_like(grad, at, len(ids))

    def own_gradient(self) -> tuple[Tensor, Tensor, bool] | None:
        """Returns ids, i64 [n] ascending, their gradient on this rank, [n, D], and whether it is sparse."""
        if self.grad is None or not self.grad.is_sparse:
            return None if self.grad is None else (*self.step_gradient(), False)
        grad = self.grad.coalesce()
        return grad._indices()[0], grad._values(), True

    def set_sum(self, ids: Tensor, gradient: Tensor, *, is_sparse: bool) -> None:
        """Sets the gradient of all ranks. `gradient`: [n, D] of rows `ids`, i64 [n] ascending."""
        if not is_sparse and len(ids) == len(self.ids):  # dense gradients have all rows of the step
            ids = self.ids
        self.grad, self.is_stepped, self.is_summed = self._shown(ids, gradient), False, True
        if is_sparse:
            self.grad = torch.sparse_coo_tensor(
                ids[None], gradient, self.shape, check_invariants=False, is_coalesced=True, device=ids.device
            )

    def of_step(self, array: Tensor, ids: Tensor) -> Tensor:
        """Takes rows from an array [U, ...] over the step's. `ids`: i64 [n], of these."""
        if ids is self.ids:
            return array
        at, _ = positions(self.ids, ids)
        return array[at]


def is_zero(gradient: Tensor) -> bool:
    if isinstance(gradient, RowGradient):
        return not bool(gradient.rows.values.any()) and gradient.rows.is_by_rows
    return not bool(gradient._values().any())


def sparse_like(gradient: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Returns a sparse gradient, [num_rows, D], with the same values in other rows. `rows`: i64 [nnz]."""
    return torch.sparse_coo_tensor(
        rows[None],
        gradient._values(),
        (num_rows, gradient.shape[1]),
        check_invariants=False,
        is_coalesced=gradient.is_coalesced(),
        device=gradient.device,
    )


def over_union(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Returns two gradients [n, D], with ids, over the rows of either: ids, i64 [m] ascending, and both [m, D].

    A row without a gradient in one of them gets +0.0 there, as it has in a whole table's."""
    if torch.equal(first[0], second[0]):
        return first[0], (first[1], second[1])
    union = torch.unique(torch.cat([first[0], second[0]]))
    return union, (spread(union, *first), spread(union, *second))


def spread(union: Tensor, ids: Tensor, gradient: Tensor) -> Tensor:
    at, _ = positions(union, ids)
    if gradient.is_sparse:
        return sparse_like(gradient, at[gradient._indices()[0]], len(union))
    wider = gradient.new_zeros((len(union), gradient.shape[1]))
    wider[at] = gradient
    return wider
