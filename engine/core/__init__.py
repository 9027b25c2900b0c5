"""The kernel: a loop that only emits events, and the parts that it needs. It imports nothing else of this package, and trains
by itself.

Read its files in this order:

1. `events`: the events of a run and their filters, and `Lifecycle`, those of the engine's own services; `connection`,
   `signals`, `bus`: who receives them, and in which order.
2. `handler`, `declarations`, `registry`: a feature that subscribes to events, what it declares, and how it joins and leaves.
3. `update`, `window`, `state`: what is trained, the accumulation window, and where the run stands.
4. `run`, `setup`, `modes`, `loop`: one run from its set-up to its end, and the loop in it. `Loop.iterate` is the whole loop.
5. `step`, `recomputation`, `iteration`: one micro-step, steps that compute their gradients again, and the signals of both.
6. `boundary`, `regions`, `overrides`: what waits for the end of an iteration, what is left at the end of a part of it, and what
   one handler alone may do.
7. `kernel`: all of it together. `Engine` adds the rooms beside this one.

`feed` and `single_process` are the seams to the rooms of data and of several processes, with the plain answers.

A batch on its way from the data to the optimizer's step passes these stations:

1. `Feed.batches`: fetches it. `data.loading` does so at its index in the epoch, on the rank that it belongs to.
2. `Loop.iterate`: reads it, ``state.batch = batch``.
3. `Loop.emit_batch`: GET_BATCH_COMPLETED and ITERATION_STARTED, where handlers move, transform or split it.
4. `Step.train`: one micro-step, and whether it closes the accumulation window.
5. `Step.compute_loss`: the forward and the loss, which users write.
6. `Step.compute_gradients`: the backward, which adds to the gradients of the window.
7. `Step.close_window`: the average over the window, GRADIENTS_READY, and the optimizer's step.
8. `Boundary.attend`: the iteration is complete, and what had to wait for that is done.

Several updates each pass 4 to 7. A handler that splits the batch, or computes gradients more than once, repeats 5 and 6, and
one that makes several steps of a batch, such as `TruncatedBPTT`, 4 to 7.
"""

from .kernel import Kernel

__all__ = ["Kernel"]
