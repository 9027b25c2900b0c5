"""Memory of the process and of the GPU as metrics."""

from __future__ import annotations

import torch

from signalfire import AnyEvent, Engine, Events, Handler, Interval, Phase, on
from signalfire.authoring import DeviceFeature, check_every, event_of

from ._common.process_memory import peak, resident
from ._common.ranks import MEASURE_RATES

__all__ = ["DeviceStatistics"]

MIB = 2**20
_OF_PROCESS = {"process_mib": resident, "process_peak_mib": peak}
_CUDA = {  # by metric: the entry of torch's statistics, and its unit
    "gpu_allocated_mib": ("allocated_bytes.all.current", MIB),
    "gpu_reserved_mib": ("reserved_bytes.all.current", MIB),
    "gpu_peak_mib": ("allocated_bytes.all.peak", MIB),
    "gpu_allocation_retries": ("num_alloc_retries", 1),
    "gpu_out_of_memory": ("num_ooms", 1),
}
_GPU: dict[str, tuple[str, ...]] = {  # the metrics of each kind of device
    "cuda": tuple(_CUDA),
    "xpu": ("gpu_allocated_mib", "gpu_reserved_mib", "gpu_peak_mib"),
    "mps": ("gpu_allocated_mib", "gpu_reserved_mib"),
}


class DeviceStatistics(Handler):
    """Measures the memory of the process and of the model's GPU, as metrics.

    The metrics in ``state.metrics`` are "process_mib", the main memory of the process, and "process_peak_mib", its peak.
    Outside Linux, the first is not available; on Windows, neither is. A CUDA GPU adds "gpu_allocated_mib" (tensors),
    "gpu_reserved_mib" (including memory that torch caches), "gpu_peak_mib" (the peak of tensors), "gpu_allocation_retries"
    (slow repeated attempts to allocate; more than a few mean that the GPU is nearly full) and "gpu_out_of_memory"
    (out-of-memory errors that were caught). XPU has the first three of these GPU metrics, and MPS the first two. In
    distributed runs, the values come from rank 0. Checkpoints do not contain these metrics.

    All sizes are whole numbers of MiB. Reading them does not wait for the device.

    Args:
        every: Interval between two measurements.

    Source:
        ``torch.cuda.memory_stats``; Linux's files in ``/proc/self``.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Linear(2, 1), seed=0)
        >>> _ = engine.attach(DeviceStatistics(every="1it"))
        >>> metrics = engine.run([(torch.ones(4, 2), torch.ones(4, 1))], max_epochs=1).metrics
        >>> sorted(metrics), metrics["process_mib"] > 10  # on a CPU
        (['process_mib', 'process_peak_mib'], True)
    """

    rank_zero_only = True
    device_features = frozenset({DeviceFeature.STATISTICS})

    def __init__(self, *, every: str | Interval | AnyEvent = "100it", name: str | None = None) -> None:
        super().__init__(name=name)
        self.every = check_every(self, every)
        self.measure_event = event_of(self.every)

    def metric_names(self, engine: Engine) -> list[str]:
        of_process = [name for name, read in _OF_PROCESS.items() if read() is not None]
        return [*of_process, *_GPU.get(engine.device.type, ())]

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["device"], writes=["metrics"])
    def announce_metrics(self, engine: Engine) -> None:
        """Announce the names of the metrics, once the model is where it is trained."""
        engine.state.metrics.announce(self.name, self.metric_names(engine), saved=False)

    @on("measure_event", phase=Phase.PREPARE, rank=MEASURE_RATES, reads=["device"], writes=["metrics"])
    def measure(self, engine: Engine) -> None:
        """Write the current values."""
        metrics = engine.state.metrics
        for name, read in _OF_PROCESS.items():
            if (size := read()) is not None:
                metrics[name] = size // MIB
        for name, value in _of_device(engine.device).items():
            metrics[name] = value


def _of_device(device: torch.device) -> dict[str, int]:
    """The memory of an accelerator, by metric; nothing for a CPU."""
    if device.type == "mps":
        values = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return {name: value // MIB for name, value in zip(_GPU["mps"], values, strict=True)}
    if device.type not in _GPU:
        return {}
    statistics = getattr(torch, device.type).memory_stats(device)
    return {name: statistics.get(_CUDA[name][0], 0) // _CUDA[name][1] for name in _GPU[device.type]}
