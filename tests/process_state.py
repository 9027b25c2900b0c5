"""The process-wide state that a handler may change during a run, as all of torch's getters answer."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config

from signalfire import Engine, Events, Handler
from tests.kit import batches, build, digest, mlp

__all__ = ["changed_by", "process_state"]


def process_state() -> dict[str, Any]:
    """Everything of the process that a handler may change."""
    backends: Any = torch.backends
    memory: Any = torch.utils.deterministic
    cudnn = backends.cudnn
    return {
        "matmul precision": _answer(torch.get_float32_matmul_precision),
        "generic": _answer(lambda: backends.fp32_precision),
        "cuda.matmul": _answer(lambda: backends.cuda.matmul.fp32_precision),
        "cuda.matmul.allow_tf32": _answer(lambda: backends.cuda.matmul.allow_tf32),
        "cudnn": _answer(lambda: cudnn.fp32_precision),
        "cudnn.conv": _answer(lambda: cudnn.conv.fp32_precision),
        "cudnn.rnn": _answer(lambda: cudnn.rnn.fp32_precision),
        "cudnn.allow_tf32": _answer(lambda: cudnn.allow_tf32),
        "mkldnn.matmul": _answer(lambda: backends.mkldnn.matmul.fp32_precision),
        "mkldnn.conv": _answer(lambda: backends.mkldnn.conv.fp32_precision),
        "mkldnn.rnn": _answer(lambda: backends.mkldnn.rnn.fp32_precision),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": memory.fill_uninitialized_memory,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "cudnn.benchmark_limit": cudnn.benchmark_limit,
        "gc": (gc.isenabled(), gc.get_freeze_count() > 0, gc.get_threshold()),
        "fallback_random": torch._inductor.config.fallback_random,
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "anomaly": torch.is_anomaly_enabled(),
    }


def changed_by(make: Callable[[], Handler], fails: str | None = None) -> dict[str, tuple[Any, Any]]:
    """What differs inside a run from before it, with both values; after the run, nothing differs.

    Args:
        make: makes the handler.
        fails: how the run ends: "error", "interrupt", "setup" for an error at MODEL_SETUP, or None for a run that completes.
    """
    engine = build(mlp(5, 8, 1), make())
    inside: list[dict[str, Any]] = []
    engine.connect(Events.FORWARD_STARTED, lambda engine: inside.append(process_state()))

    def fail(engine: Engine) -> None:
        raise KeyboardInterrupt if fails == "interrupt" else ValueError("for the test")

    if fails is not None:
        engine.connect(Events.MODEL_SETUP if fails == "setup" else Events.LOSS_COMPUTED(once=2), fail)
    before, random = process_state(), digest(torch.get_rng_state())
    if fails is None:
        engine.run(batches(3), max_epochs=1)
    else:
        with pytest.raises((ValueError, KeyboardInterrupt)):
            engine.run(batches(3), max_epochs=1)
    assert process_state() == before
    assert digest(torch.get_rng_state()) == random
    seen = inside[-1] if inside else before
    return {key: (before[key], value) for key, value in seen.items() if value != before[key]}


def _answer(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except (RuntimeError, AttributeError) as error:  # torch before 2.9 has fewer
        return str(error)
