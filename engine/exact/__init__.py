"""Exactness for your own loops: what an engine does for its resume, without the engine.

A plain loop that is killed anywhere and started again ends with the weights of one that was never stopped::

    data = ResumableData(DataLoader(dataset, batch_size=32, shuffle=True))
    folder = CheckpointFolder("runs/plain")
    step = 0
    if (newest := folder.newest()) is not None:
        step = newest.step
        model.load_state_dict(newest.state["model"])
        optimizer.load_state_dict(newest.state["optimizer"])
        data.load_state_dict(newest.state["data"])
        restore_random_state(newest.state["random"])
    while data.epoch < 10:
        for batch in data:  # continues after the last batch of the saved pass
            train_on(batch)
            step += 1
            if step % 100 == 0:
                folder.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "data": data.state_dict(),
                        "random": random_state(),
                    },
                    step=step,
                )

Whatever else a loop keeps belongs into the state as well: schedules, scalers, averages, the gradients of an open accumulation
window, patience.

The trainers of Hugging Face and Lightning get the same from a callback: `signalfire.exact.huggingface` and
`signalfire.exact.lightning`, which are imported on their own, since they import those libraries.
"""

from .data import ResumableData
from .folder import CheckpointFolder, Saved
from .random import random_state, restore_random_state
from .samples import SeededSamples

__all__ = ["CheckpointFolder", "ResumableData", "Saved", "SeededSamples", "random_state", "restore_random_state"]
