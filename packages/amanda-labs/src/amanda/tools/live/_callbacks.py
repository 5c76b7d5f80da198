"""Callbacks of transformers' Trainer, Lightning and Keras that open the scope, and end steps."""

from __future__ import annotations

import atexit
from typing import Any

import amanda
from amanda.tools.live._tool import LiveTool
from amanda.tools.live._writers import LiveError


class _Training:
    """The LiveTools of a callback, and their scope from the begin to the end of a training.

    Steps begin, end and are numbered by calls of the trainer's callback alone.
    """

    def __init__(self, lives: tuple[LiveTool, ...]) -> None:
        if not lives:
            raise LiveError("a callback wants one LiveTool or several")
        for live in lives:
            if not isinstance(live, LiveTool):
                raise LiveError(f"a callback wants LiveTool(tool, writer), not a {type(live).__name__}")
        self._lives = lives
        self._scope: amanda.Scope | None = None

    def begin(self, step: int) -> None:
        """Begin a training after a step, 0 or that of a checkpoint; open the scope unless the program did.

        A training that has not ended, as after an exception, ends here, or as the process does.
        """
        self.end()  # of an earlier training, if an exception has ended it
        for live in self._lives:
            live.begin_calls(step)
        # A scope that the program opened itself stays the program's.
        if not all(live.is_open for live in self._lives):
            self._scope = amanda.apply(*self._lives)
            self._scope.start()
            # Neither the Trainer nor Keras calls back after an exception.
            atexit.register(self.end)

    def begin_step(self) -> None:
        for live in self._lives:
            live.begin_step()

    def end_step(self, number: int) -> None:
        for live in self._lives:
            live.end_step(number)

    def end(self) -> None:
        """Close the scope if `begin` opened one, which saves results and closes writers."""
        scope, self._scope = self._scope, None
        if scope is not None:
            atexit.unregister(self.end)
            scope.stop()


def transformers_callback(*lives: LiveTool) -> Any:
    """Return a callback for the Trainer of transformers, one of its `callbacks`.

    Steps are those of the Trainer, `global_step`; evaluation between steps is seen by tools that run
    throughout alone.  Of several processes the first logs.

    Args:
        *lives: Tools that log the steps of the Trainer.

    Raises:
        ImportError: Without transformers.
    """
    from transformers import TrainerCallback

    class LiveCallback(TrainerCallback):
        """Opens the scope as training begins, and closes it as training ends."""

        def __init__(self) -> None:
            self._training = _Training(lives)
            self._is_first_process = False

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._is_first_process = state.is_world_process_zero
            if self._is_first_process:
                self._training.begin(state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._is_first_process:
                self._training.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._is_first_process:
                self._training.end_step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._training.end()

    return LiveCallback()


def lightning_callback(*lives: LiveTool) -> Any:
    """Return a callback for the Trainer of Lightning, one of its `callbacks`.

    Steps are those of the Trainer, `global_step`; validation between steps is seen by tools that run
    throughout alone.  Of several processes the first logs.

    Args:
        *lives: Tools that log the steps of the Trainer.

    Raises:
        ImportError: Without lightning.
    """
    from lightning.pytorch.callbacks import Callback

    class LiveCallback(Callback):
        """Opens the scope as training begins, and closes it as training ends or raises."""

        def __init__(self) -> None:
            self._training = _Training(lives)
            self._step = -1  # global step of the first process; -1 in others, which do not log

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.is_global_zero:
                self._step = trainer.global_step
                self._training.begin(self._step)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if self._step >= 0:
                self._training.begin_step()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            # A batch whose gradients are accumulated ends no step.
            if 0 <= self._step < trainer.global_step:
                self._step = trainer.global_step
                self._training.end_step(self._step)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._training.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._training.end()

    return LiveCallback()


def keras_callback(*lives: LiveTool) -> Any:
    """Return a callback for Keras, one of the `callbacks` of `fit`.

    Steps are those of the optimizer, `model.optimizer.iterations`; validation between steps is seen by
    tools that run throughout alone.

    Args:
        *lives: Tools that log the steps of `fit`.

    Raises:
        ImportError: Without keras.
    """
    import keras

    class LiveCallback(keras.callbacks.Callback):
        """Opens the scope as training begins, and closes it as training ends."""

        def __init__(self) -> None:
            super().__init__()
            self._training = _Training(lives)
            self._steps_before_epoch = 0

        def on_train_begin(self, logs: Any = None) -> None:
            self._steps_before_epoch = int(self.model.optimizer.iterations)
            self._training.begin(self._steps_before_epoch)

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            # Read once an epoch: the variable may lie on a GPU, which would be waited for at each step.
            self._steps_before_epoch = int(self.model.optimizer.iterations)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._training.begin_step()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._training.end_step(self._steps_before_epoch + batch + 1)

        def on_train_end(self, logs: Any = None) -> None:
            self._training.end()

    return LiveCallback()
