"""Eviction of storages within a budget, and recomputation of evicted ones by running ops again."""

from __future__ import annotations

import logging
import weakref
from heapq import heapify, heappop, heapreplace
from time import perf_counter
from typing import Any

from amanda.tools.libraries import tree_map
from amanda.tools.remat._pytorch import TorchRuntime
from amanda.tools.remat._storage import (
    BudgetError,
    Heuristic,
    InputRef,
    Ledger,
    OpCounts,
    RematError,
    ReplayableOp,
    ScratchInput,
    Storage,
    leave_evicted_neighbours,
)

EXACT_HEAPS, STORAGES_PER_VICTIM = 128, 8
"""A heap of candidates serves one eviction, and one more for each `STORAGES_PER_VICTIM` beyond
`EXACT_HEAPS`: to score thousands of storages for each eviction would cost more than the ops."""
logger = logging.getLogger("amanda")


class Eviction:
    """Eviction of storages that ops can make again, so that the live bytes stay within a budget.

    budget: bytes, None for no bound.  strict: raise BudgetError if the budget cannot be held.
    recomputed: storages that were evicted and made again.
    """

    def __init__(
        self, torch: TorchRuntime, ledger: Ledger, budget: int | None, heuristic: Heuristic, strict: bool
    ) -> None:
        self.torch, self.ledger, self.budget, self.strict = torch, ledger, budget, strict
        self._heuristic = heuristic
        # Weak: a storage that nobody reads any more is dropped with the tensor that holds it.
        self.recomputed: weakref.WeakSet[Storage] = weakref.WeakSet()
        self._generation = 0  # ops that were secured in an earlier one are not secured any more
        self._score_heap: list[tuple[float, int, weakref.ref[Storage]]] = []  # the lowest score first
        # Evictions that the heap still serves, and serves in all.
        self._victims_left = self._victims_per_heap = 0

    def make_room(self, needed_bytes: int, counts: OpCounts, is_exact: bool = True) -> None:
        """Evict until more bytes fit in the budget, or nothing more can be evicted; no budget, no eviction.

        Before, freed memory leaves the account, and recomputed tensors that no backward op reads are dropped.
        counts: of the op that needs the bytes.  is_exact: raise BudgetError, or warn, if they do not fit;
        False for an estimate, which may be too high.
        """
        # Storages that the program has freed make room without an eviction.
        self.ledger.remove_freed_memory()
        if self.budget is None:
            return
        if self.ledger.bytes + needed_bytes > self.budget:
            self._drop_tensors_after_backward()
        refused: set[Storage] = set()
        while self.ledger.bytes + needed_bytes > self.budget:
            victim = self._take_next_victim(refused)
            if victim is None:
                if is_exact:
                    self._report_shortage(needed_bytes, counts)
                return
            # The program turned out to hold the memory: do not try this storage again for this op.
            if not self._evict(victim):
                refused.add(victim)

    def _drop_tensors_after_backward(self) -> None:
        """Drop the tensors that hold recomputed storages which no backward op reads any more."""
        for storage in list(self.recomputed):
            is_needed = storage.handles or storage.locks  # by autograd, or by a recomputation under way
            if storage.held_tensor is None or storage.maker is None:
                self.recomputed.discard(storage)
            elif not is_needed and storage.maker.backward_is_over:
                storage.held_tensor = None
        self.ledger.remove_freed_memory()

    def _take_next_victim(self, refused: set[Storage]) -> Storage | None:
        """Return the storage with the lowest score, and take it from the heap; None if there is no candidate.

        A heap of scores serves several evictions.  Scores grow meanwhile, so the score of the first storage
        is computed again: the storage is returned, or put back if its score has risen.
        refused: storages that are no candidates.
        """
        if self._victims_left <= 0 or not self._score_heap:
            self._fill_score_heap(refused)
        while self._score_heap:
            score, number, reference = self._score_heap[0]
            storage = reference()
            if storage is None or not self._is_candidate(storage, refused):
                heappop(self._score_heap)
            elif (present_score := self._score(storage)) > score:
                heapreplace(self._score_heap, (present_score, number, reference))
            else:
                heappop(self._score_heap)
                self._victims_left -= 1
                return storage
            # A heap that has served an eviction lacks the storages that came since: look once more.
            has_served = self._victims_left < self._victims_per_heap
            if not self._score_heap and has_served:
                self._fill_score_heap(refused)
        return None

    def _fill_score_heap(self, refused: set[Storage]) -> None:
        """Make a new heap of the storages that can be evicted, and set how many evictions it serves."""
        candidates = [storage for storage in self.ledger.storages() if self._is_candidate(storage, refused)]
        # The number decides between equal scores: references have no order.
        self._score_heap = [(self._score(s), number, weakref.ref(s)) for number, s in enumerate(candidates)]
        heapify(self._score_heap)
        self._victims_per_heap = max((len(candidates) - EXACT_HEAPS) // STORAGES_PER_VICTIM, 1)
        self._victims_left = self._victims_per_heap

    def _score(self, storage: Storage) -> float:
        """Return the present score of a storage; the lowest is evicted first."""
        # Above 0, since heuristics divide by the staleness.
        return self._heuristic(storage, self.ledger.clock - storage.last_read + 1e-9)

    def _is_candidate(self, storage: Storage, refused: set[Storage]) -> bool:
        """Return True for a storage that can be made again, and that nothing but this tool holds.

        False for one that is empty, locked by a recomputation, or refused.
        """
        if not storage.maker or storage.locks or not storage.size or storage in refused:
            return False
        return self._is_held_by_tool_alone(storage)

    def _is_held_by_tool_alone(self, storage: Storage) -> bool:
        """Return True if only this tool holds a storage."""
        # A handle without a tensor is one whose storage is evicted.
        handle_count = sum(handle.tensor is not None for handle in storage.handles.alive())
        own_count = handle_count + (storage.held_tensor is not None)
        # The use count covers holders in C++ as well, such as a saved tensor of a node that no tool knows.
        return own_count > 0 and self.torch.use_count(storage.address) == own_count

    def _report_shortage(self, needed_bytes: int, counts: OpCounts) -> None:
        """Raise BudgetError if the tool is strict, otherwise warn once, and record the missing bytes."""
        assert self.budget is not None
        short_bytes = self.ledger.bytes + needed_bytes - self.budget
        message = (
            f"{counts.type} at {counts.source} needs {needed_bytes:,} bytes more than the "
            f"{self.ledger.bytes:,} that are alive with it and cannot be evicted; the budget is "
            f"{self.budget:,}"
        )
        if self.strict:
            raise BudgetError(message)
        # Warned once: later shortages only raise the number in the result.
        if not self.ledger.totals.short:
            logger.warning("the memory budget is exceeded by %s bytes: %s", f"{short_bytes:,}", message)
        self.ledger.totals.short = max(self.ledger.totals.short, short_bytes)

    def _evict(self, storage: Storage) -> bool:
        """Drop the tensors by which this tool holds a storage; return True if its memory was freed.

        Counts the eviction, and first holds what a recomputation reads.  False if the storage cannot be made
        again, or if the program holds it, which then stays so.
        """
        maker = storage.maker
        # Ahead of the drop: the inputs of the op must be held before memory goes away.
        if maker is None or not self.secure_recomputation(maker):
            return False
        filled_handles = [handle for handle in storage.handles.alive() if handle.tensor is not None]
        for handle in filled_handles:
            handle.tensor = None
        storage.held_tensor = None
        memory = storage.live_memory
        if memory is not None:  # the program holds the storage itself, not by a tensor
            for handle in filled_handles:
                self.torch.refill(handle, memory)
            storage.maker = None
            return False
        self.ledger.remove_freed_memory()
        # Counted after the memory is gone, since an attempt may fail.
        maker.counts.evictions += 1
        maker.counts.evicted_bytes += storage.size
        return True

    def forget_secured_ops(self) -> None:
        """Count no op as secured any more: memory is about to be written that recomputations may read."""
        # A counter, so that this takes no walk over all ops.
        self._generation += 1

    def secure_recomputation(self, target: ReplayableOp) -> bool:
        """Hold the inputs that runs of an op and of its ancestors need; return True if it can run again.

        Of ops that depend on memory that is gone and cannot be made again, no storage is evicted any more.
        """
        recomputable: set[ReplayableOp] = set()
        # Ancestors first, so that it is known of each input whether its maker can run again.
        for operation in self._find_unsecured_ancestors(target):
            if all(self._can_be_read_again(ref.storage, recomputable) for ref in operation.input_refs):
                recomputable.add(operation)
            else:
                # Without the inputs, what the op made is lost once evicted: it stays.
                for storage in operation.products:
                    if storage.live_memory is not None:
                        storage.maker = None
        if target not in recomputable:
            return False
        for operation in recomputable:
            operation.secured_generation = self._generation  # until `forget_secured_ops`
            for ref in operation.input_refs:
                # An input that no op makes again, such as a parameter or the batch.
                if ref.storage.maker is None and ref.storage.held_tensor is None:
                    self._keep_alive(ref)
        return True

    def _find_unsecured_ancestors(self, target: ReplayableOp) -> list[ReplayableOp]:
        """Return an op and the ops that make its inputs, without secured ones, in execution order."""
        ancestors, pending = {target}, [target]
        while pending:
            for ref in pending.pop().input_refs:
                maker = ref.storage.maker
                if maker is not None and maker not in ancestors and not self._is_secured(maker):
                    ancestors.add(maker)
                    pending.append(maker)
        # In the order of execution inputs are decided before the ops that read them.
        return sorted(ancestors, key=lambda operation: operation.number)

    def _is_secured(self, operation: ReplayableOp) -> bool:
        return operation.secured_generation == self._generation

    def _can_be_read_again(self, storage: Storage, recomputable: set[ReplayableOp]) -> bool:
        """Return True for a storage whose maker can run again, as one of the set or a secured op.

        A storage without a maker has to be alive.
        """
        maker = storage.maker
        if maker is None:
            return storage.live_memory is not None
        return maker in recomputable or self._is_secured(maker)

    def _keep_alive(self, ref: InputRef) -> None:
        """Hold the storage of an input that no op can make again, for recomputations that read it."""
        tensor = ref.tensor()
        if tensor is None or tensor._version != ref.version:
            # The tensor object is gone, or was written through another one: the bytes themselves are held.
            tensor = self.torch.byte_tensor(ref.storage.live_memory)
        self.ledger.keep_alive(ref.storage, tensor.detach())

    def cut_history(self, storage: Storage) -> None:
        """Mark a storage as one that cannot be made again, since autograd has detached its tensor.

        Its memory is held if the recomputation of a secured op may read it.
        """
        maker, storage.maker = storage.maker, None
        if maker is not None and self._is_secured(maker) and storage.held_tensor is None:
            self.ledger.keep_alive(storage, self.torch.byte_tensor(storage.live_memory))


class StorageRecomputation:
    """Recomputation of evicted storages, within the budget."""

    def __init__(self, torch: TorchRuntime, ledger: Ledger, eviction: Eviction) -> None:
        self.torch, self.ledger, self._eviction = torch, ledger, eviction

    def materialise(self, target: Storage, bounded: bool = True) -> Any:
        """Return the memory of a storage; recompute an evicted one, and those that this needs.

        bounded: evict other storages if the budget would be exceeded; raises BudgetError as `make_room` does.
        Raises RematError if an op's results differ in size from the first run, or if its inputs were written
        without instrumentation.
        """
        # A stack instead of recursion, since chains of evicted storages are as long as the model is deep.
        # Each storage on it locks the inputs that are there, so that room for one evicts no other.
        stack: list[tuple[Storage, set[Storage]]] = [(target, set())]
        try:
            while stack:
                self.ledger.remove_freed_memory()
                storage, locked_inputs = stack[-1]
                if storage.live_memory is not None:
                    stack.pop()
                    _unlock_storages(locked_inputs)
                    continue
                maker = storage.maker
                if maker is None:
                    raise RematError(
                        "a tensor that is needed to compute evicted ones again was written unseen"
                    )
                missing_input = _lock_inputs(maker, locked_inputs)
                if missing_input is not None:  # comes first, then this storage once more
                    stack.append((missing_input, set()))
                    continue
                if bounded:
                    self._eviction.make_room(maker.size, maker.counts)
                self._recompute(maker, storage)
        finally:
            for _, locked_inputs in stack:
                _unlock_storages(locked_inputs)
        target.last_read = self.ledger.clock
        return target.live_memory

    def _recompute(self, operation: ReplayableOp, target: Storage) -> None:
        """Run an op again, restore the target and storages that autograd still holds, and count the run.

        Its cost advances the clock.
        """
        counts = operation.counts
        begin = perf_counter()
        inputs = tree_map(self._rebuild_input, operation.inputs)
        results, saved_tensors = self.torch.replay(operation.compute, inputs, operation.settings)
        # A repeated run makes all results of the op, also those that are not needed.
        self.ledger.update_peak(operation.size)
        for storage in operation.products:
            # Other results that autograd still needs come for free; the rest is dropped at once.
            if storage.live_memory is None and (storage is target or storage.handles):
                # As at the first run, the memory is that of a result or of a tensor that autograd saves.
                tensors = saved_tensors if storage.slot.is_saved else results
                position = storage.slot.position
                tensor = tensors[position] if position < len(tensors) else None
                self._restore_storage(storage, tensor, counts)
        counts.rematerialisations += 1
        counts.seconds += perf_counter() - begin
        # Recomputation takes time too, by which all storages grow stale.
        self.ledger.clock += operation.cost

    def _restore_storage(self, storage: Storage, tensor: Any, counts: OpCounts) -> None:
        """Give a storage the memory that a repeated run has made; raise RematError for another size.

        tensor: in that memory; None if the run made none.
        """
        framework_storage = None if tensor is None else tensor.untyped_storage()
        size = None if framework_storage is None else framework_storage.nbytes()
        if size != storage.size:
            raise RematError(
                f"{counts.type} at {counts.source} made {storage.size:,} bytes at first, and "
                f"{'none' if size is None else size} when it was run again"
            )
        leave_evicted_neighbours(storage)
        storage.last_read = self.ledger.clock
        self.ledger.add(framework_storage, storage, counts=True)
        self.ledger.keep_alive(storage, self.torch.byte_tensor(framework_storage))
        self._eviction.recomputed.add(storage)

    def _rebuild_input(self, value: Any) -> Any:
        """Return an input for a repeated run; raise RematError if it was written without instrumentation.

        A recorded tensor becomes a view of its storage, or zeros if the op only writes it; other values stay.
        """
        if isinstance(value, ScratchInput):
            geometry = value.geometry
            # Scratch: the op overwrites it, so that any memory will do.
            return self.torch.torch.zeros(geometry.size, dtype=geometry.dtype, device=value.device)
        if not isinstance(value, InputRef):
            return value
        storage = value.storage
        tensor = value.tensor()
        is_written = storage.held_tensor is not None and storage.held_tensor._version != storage.held_version
        if is_written or (tensor is not None and tensor._version != value.version):
            raise RematError(
                f"a tensor of {storage.size:,} bytes that is needed to compute evicted ones again was "
                "written where no tool saw it; write it inside the scope, with instrumentation on"
            )
        storage.last_read = self.ledger.clock
        view = self.torch.view(storage.live_memory, value.geometry)
        return view.requires_grad_() if value.requires_grad else view


def _lock_inputs(operation: ReplayableOp, locked: set[Storage]) -> Storage | None:
    """Lock the inputs of an op that have memory, and add them to `locked`; return the first evicted one."""
    first_evicted = None
    for ref in operation.input_refs:
        if ref.storage.live_memory is None:
            first_evicted = first_evicted or ref.storage
        elif ref.storage not in locked:
            ref.storage.locks += 1
            locked.add(ref.storage)
    return first_evicted


def _unlock_storages(storages: set[Storage]) -> None:
    """Allow storages to be evicted again, unless another recomputation has locked them too."""
    for storage in storages:
        storage.locks -= 1
