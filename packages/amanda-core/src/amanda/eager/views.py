"""Links between views and the values with which routines replaced them, so that writes reach both.

The value that a routine returns has memory of its own. A program that writes into the value, or into the base
of the view, would no longer see the write on the other side. `Views` stores which value replaced which view,
and after each op that writes, it copies the written elements to the other side.

A tie connects such a value with its view; its ends are the memories of both. A value may itself lie in the
memory of another tie's view, so ties form chains. A link is a tie whose value the program has dropped, and
which other ties still lead over.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from amanda.plan.lifetime import plan_lifetimes
from amanda.plan.tensors import spread
from amanda.scope.state import when_enabled_again

Label = tuple[str, str]
"""Name of an op, and the user's line."""


class Tie(ABC):
    """A value from a routine, and the view that it replaced.

    ends: the memory of the value, and the memory of the view, in this order.
    """

    ends: tuple[Hashable, Hashable]

    @property
    @abstractmethod
    def value(self) -> Any:
        """Return the value; None if the program has dropped it."""

    @property
    def is_link(self) -> bool:
        """Return True if the program has dropped the value, so that the tie only connects other ties."""
        return self.value is None

    @property
    @abstractmethod
    def view(self) -> Any:
        """Return the view, outside autodiff."""

    @abstractmethod
    def copy_across(self, start: Hashable, written: Any) -> Any:
        """Copy written elements from one end to the other; return the elements written there, None if none.

        Args:
            start: Memory that was written.
            written: Part of the memory that was written, as `Views.written_parts` returns it.
        """

    @abstractmethod
    def side_written_unseen(self) -> Any:
        """Return the side that was written past the driver since the last copy; None if neither was."""

    @abstractmethod
    def turn_into_view(self) -> bool:
        """Turn the value into a view again if its contents equal the view's; return True if it is one."""


class Views(ABC):
    """The ties between a framework's views and the routines' values that replaced them, while these live.

    watches_writes: whether there was a tie since the last scope opened. From then on ops that write run in
    Python, so that their writes are seen.
    """

    def __init__(self) -> None:
        self.watches_writes = False
        _all_views.add(self)
        self._ties: dict[Hashable, list[Tie]] = {}  # by the memory of either end
        self._label_by_tie: dict[Tie, Label] = {}
        # Told as the last scope closes: a report at each write would be one at each step of a training.
        self._labels_of_lost_writes: list[Label] = []

    @abstractmethod
    def memory(self, value: Any) -> Hashable:
        """Return the identity of a tensor's memory; None where it has none or the memory is unknown."""

    def components_of(self, value: Any) -> Sequence[Any]:
        """Return the tensors that a composite tensor consists of; for a plain tensor, the tensor itself."""
        return (value,)

    def keeps_alive(self, view: Any, value: Any) -> bool:
        """Return True if the framework keeps a tensor while the program has a view of it.

        Args:
            view: View of the tensor, such as an output of an op.
            value: The tensor.
        """
        return True

    @abstractmethod
    def is_in_foreign_memory(self, value: Any) -> bool:
        """Return True if a tensor lies in memory of another library, such as a NumPy array's."""

    @abstractmethod
    def create_tie(
        self, view: Any, value: Any, is_input: bool, on_death: Callable[[Tie], None],
        holders: Sequence[Any] = (),
    ) -> Tie:  # fmt: skip
        """Tie a value to a view.

        Args:
            view: Tensor of the program.
            value: Tensor from a routine, which replaced the view.
            is_input: Whether the view is an input of the op, not an output.
            on_death: Called with the tie once the program has dropped the value.
            holders: Program's tensors in whose memory the value lies, if the program does not hold the value.
        """

    @abstractmethod
    def copy_in_layout(self, view: Any, value: Any) -> Any:
        """Return a differentiable copy of a tensor with its own memory and, if possible, a view's strides.

        Args:
            view: Tensor with the strides.
            value: Tensor to copy.
        """

    @abstractmethod
    def shares_memory(self, value: Any) -> bool:
        """Return True if a tensor certainly shares its memory."""

    @abstractmethod
    def have_same_layout(self, first: Any, second: Any) -> bool:
        """Return True if two tensors have the same layout, so that an op returns views of both or neither.

        Args:
            first: A tensor.
            second: A tensor of the same shape.
        """

    @abstractmethod
    def written_parts(self, values: Sequence[Any]) -> dict[Hashable, Any]:
        """Return the written part of each memory, for some written tensors."""

    def __bool__(self) -> bool:
        return bool(self._ties)

    def tie_inputs(
        self,
        originals: Sequence[Any],
        replacements: Sequence[Any],
        outputs: Sequence[Any],
        run_on_originals: Callable[[], Sequence[Any]],
        label: Label,
    ) -> None:
        """Tie values that replaced inputs to these inputs, where the op returns views of its inputs.

        Args:
            originals: Inputs of the op, as the program passes them.
            replacements: Values with which the op ran.
            outputs: Outputs of the op.
            run_on_originals: Runs the op on its original inputs, to see if the outputs are views of these.
            label: Name and source line of the op, for the report.
        """
        flat_outputs = spread(outputs)
        memories_of_outputs = [self._memories(output) for output in flat_outputs]
        for input_part, value_part, value in self._replaced_parts(originals, replacements):
            value_memory = self.memory(value_part)
            views_of_value = [
                output for output, memories in zip(flat_outputs, memories_of_outputs, strict=True)
                if any(self._reaches(memory, {value_memory}) for memory in memories)
            ]  # fmt: skip
            if value_memory is None or not views_of_value or input_part.shape != value_part.shape:
                continue
            # Otherwise the program may drop the value and keep an output in its memory, which then decides
            # how long the tie lives.
            value_outlives_outputs = value_part is value and all(
                self.keeps_alive(output, value) for output in views_of_value
            )
            # Of tensors with the same layout the op returns views of both; else it has to run to tell.
            has_views_of_both = value_outlives_outputs and self.have_same_layout(input_part, value_part)
            if has_views_of_both or any(
                self.memory(input_part) in self._memories(output) for output in spread(run_on_originals())
            ):
                holders = () if value_outlives_outputs else views_of_value
                self._add_tie(input_part, value_part, is_input=True, label=label, holders=holders)

    def _replaced_parts(
        self, originals: Sequence[Any], replacements: Sequence[Any]
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Yield each part of an original, the part of a value that replaced it, and that whole value.

        An original is left out if its value has another number of parts.
        """
        for original, value in _replaced_pairs(originals, replacements):
            original_parts, value_parts = self.components_of(original), self.components_of(value)
            if len(original_parts) == len(value_parts):
                for original_part, value_part in zip(original_parts, value_parts, strict=True):
                    yield original_part, value_part, value

    def tie_outputs(
        self, inputs: Sequence[Any], outputs: Sequence[Any], replacements: Sequence[Any], label: Label
    ) -> list[Any]:
        """Tie values that replaced outputs to these outputs if they are views; return the values to use.

        Args:
            inputs: Values with which the op ran.
            outputs: Outputs of the op.
            replacements: Outputs after the routines.
            label: Name and source line of the op, for the report.
        """
        # Read before any output is linked, which changes what lies in which memory.
        input_memories = {id(tensor): self._memories(tensor) for tensor in spread(inputs)}
        return [
            self._tie_output(old, new, input_memories, label)
            for old, new in zip(outputs, replacements, strict=True)
        ]

    def copy_writes(self, values: Sequence[Any]) -> None:
        """Copy an op's writes into these tensors to the other sides of their ties."""
        parts = [part for value in values for part in self.components_of(value)]
        tied_parts = [part for part in parts if self.memory(part) in self._ties]
        if tied_parts:
            self._copy_along_ties(self.written_parts(tied_parts))

    def copy_unseen_writes(self) -> None:
        """Copy writes that no driver has seen, such as under `amanda.disabled()`.

        What cannot be copied is noted for `untie_all`.
        """
        for tie in list(self._label_by_tie):
            written_side = tie.side_written_unseen()
            if written_side is not None:
                try:
                    self._copy_along_ties(self.written_parts([written_side]))
                except Exception:  # frameworks forbid some writes, as into an expanded tensor
                    self._labels_of_lost_writes.append(self._label_by_tie[tie])

    def untie_all(self) -> Iterator[Label]:
        """Turn values back into views as the last scope closes; forget all ties.

        Yields the labels of ties that stay apart, since contents would change, and of writes that were lost.
        """
        self.copy_unseen_writes()
        for tie in self._living_ties():
            if not tie.turn_into_view():
                yield self._label_by_tie[tie]
        self._ties.clear()
        yield from self._labels_of_lost_writes
        self._label_by_tie.clear()
        self._labels_of_lost_writes.clear()
        self.watches_writes = False

    def _memories(self, value: Any) -> set[Hashable]:
        """Return the memories that a tensor lies in."""
        return {memory for memory in map(self.memory, self.components_of(value)) if memory is not None}

    def _tie_output(
        self, view: Any, value: Any, input_memories: dict[int, set[Hashable]], label: Label
    ) -> Any:
        """Tie a routine's value to the output that it replaced; return the value, or a copy that can be tied.

        Returns the value untied where no write could reach both.  A list is tied tensor by tensor.
        input_memories: the memories of the op's inputs, by the input's `id`.
        """
        if value is view:
            return value
        if isinstance(view, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(view):
                return value
            linked_values = [
                self._tie_output(*pair, input_memories, label) for pair in zip(view, value, strict=True)
            ]
            return tuple(linked_values) if isinstance(value, tuple) else linked_values
        view_memory, value_memory = self.memory(view), self.memory(value)
        memories_of_inputs = set().union(*input_memories.values())
        if view_memory is None:
            return self._tie_components(view, value, memories_of_inputs, label)
        if value_memory is None or value_memory == view_memory or view.shape != value.shape:
            return value  # a differentiable routine may return another shape, which has no elements in common
        # The output has memory of its own, so nothing else can be written through it.
        if not (self._reaches(view_memory, memories_of_inputs) or self.is_in_foreign_memory(view)):
            return value
        is_in_use = (
            value_memory in memories_of_inputs or value_memory in self._ties or self.shares_memory(value)
        )
        if is_in_use or not self.have_same_layout(view, value):
            value = self.copy_in_layout(view, value)  # which can be tied
        self._add_tie(view, value, is_input=id(view) in input_memories, label=label)
        return value

    def _reaches(self, memory: Hashable, memories: set[Hashable]) -> bool:
        """Return True if a memory is among some memories, or if ties of values in it lead to one of them."""
        reached = [memory]
        while reached:
            if not memories.isdisjoint(reached):
                return True
            ends = [
                tie.ends for start in reached for tie in self._ties.get(start, ()) if tie.ends[0] == start
            ]
            reached = [view_memory for _, view_memory in ends]
        return False

    def _ties_of_values_in(self, memory: Hashable) -> list[Tie]:
        """Return the ties whose value, not whose view, lies in a memory."""
        return [tie for tie in self._ties.get(memory, ()) if tie.ends[0] == memory]

    def _tie_components(self, view: Any, value: Any, memories: set[Hashable], label: Label) -> Any:
        """Tie the parts of a composite value, such as a sparse tensor, to parts of a view in some memories.

        Returns the value; a copy of it, which can be tied, if its parts lie in these memories or have ties.
        """
        pairs = self._replaced_component_pairs(view, value, memories)
        if any(
            self.memory(value_part) in memories or self.memory(value_part) in self._ties
            for _, value_part in pairs
        ):
            value = self.copy_in_layout(view, value)
            pairs = self._replaced_component_pairs(view, value, memories)
        for view_part, value_part in pairs:
            # The program holds the composite value, not the part.
            self._add_tie(view_part, value_part, is_input=False, label=label, holders=(value,))
        return value

    def _replaced_component_pairs(
        self, view: Any, value: Any, memories: set[Hashable]
    ) -> list[tuple[Any, Any]]:
        """Return the parts of a view that lie in some memories, each with the part that replaced it."""
        parts = zip(self.components_of(view), self.components_of(value), strict=False)
        return [
            (view_part, value_part) for view_part, value_part in parts
            if view_part.shape == value_part.shape and self.memory(view_part) != self.memory(value_part)
            and self._reaches(self.memory(view_part), memories)
        ]  # fmt: skip

    def _add_tie(
        self, view: Any, value: Any, is_input: bool, label: Label, holders: Sequence[Any] = ()
    ) -> None:
        """Tie a value to a view, unless that closes a cycle or the value has a tie.

        From the first tie on, ops that write run in Python.  is_input, holders: as in `create_tie`.
        """
        value_memory = self.memory(value)
        if self._reaches(self.memory(view), {value_memory}):
            return  # a cycle of ties would copy a write forever
        if self._ties_of_values_in(value_memory):
            return
        tie = self.create_tie(view, value, is_input, self._drop_tie, holders)
        self._label_by_tie[tie] = label
        for memory in tie.ends:
            self._ties.setdefault(memory, []).append(tie)
        if not self.watches_writes:
            self.watches_writes = True
            for stack in list(plan_lifetimes.stacks):
                stack.run_writes_in_python()

    def _drop_tie(self, tie: Tie) -> None:
        """Drop a tie whose value is dead, and links that only this tie led to.

        While other ties start at views of the value, the tie stays as a link between them and the base.
        """
        value_memory, view_memory = tie.ends
        is_between_ties = any(other is not tie for other in self._ties.get(value_memory, ()))
        if tie not in self._label_by_tie or is_between_ties:
            return
        del self._label_by_tie[tie]
        for memory in tie.ends:
            ties = self._ties.get(memory, [])
            if tie in ties:
                ties.remove(tie)
            if not ties:
                self._ties.pop(memory, None)
        for outer_tie in self._ties_of_values_in(view_memory):
            if outer_tie.is_link:
                self._drop_tie(outer_tie)

    def _living_ties(self) -> list[Tie]:
        return [tie for tie in list(self._label_by_tie) if tie.value is not None]

    def _copy_along_ties(self, written_by_memory: dict[Hashable, Any]) -> None:
        """Copy written parts of memories along all ties; this ends, since ties have no cycle."""
        # Entries: a memory, the part of it that was written, and the tie over which the write came, if any.
        queue: list[tuple[Hashable, Any, Tie | None]] = [
            (memory, written, None) for memory, written in written_by_memory.items()
        ]
        while queue:
            memory, written, source_tie = queue.pop(0)
            for tie in list(self._ties.get(memory, ())):
                # The tie over which a write came must not carry it back.
                if tie is source_tie:
                    continue
                copied = tie.copy_across(memory, written)
                if copied is not None:
                    value_memory, view_memory = tie.ends
                    other_memory = view_memory if memory == value_memory else value_memory
                    queue.append((other_memory, copied, tie))


def copy_all_unseen_writes() -> None:
    """Copy writes that the program has made while instrumentation was off."""
    for views in list(_all_views):
        views.copy_unseen_writes()


# Weak, since a driver of a test goes away with its views.
_all_views: weakref.WeakSet[Views] = weakref.WeakSet()
when_enabled_again.append(copy_all_unseen_writes)


def _replaced_pairs(originals: Sequence[Any], replacements: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of an original and the value that replaced it, inside lists too; none of unequal lists."""
    pairs: list[tuple[Any, Any]] = []
    for old, new in zip(originals, replacements, strict=True):
        if new is old:
            continue
        if not isinstance(old, (list, tuple)):
            pairs.append((old, new))
        elif isinstance(new, (list, tuple)) and len(new) == len(old):
            pairs += _replaced_pairs(old, new)
    return pairs
