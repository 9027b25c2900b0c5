"""Which weights are exported: the model's own, or averages that a handler keeps of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from ..resuming.changeable import own_parameters
from ..updates.optimizer_modes import weights_to_evaluate

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["Averaging", "averages_in_place", "check_average", "find_averaging"]


class Averaging(Protocol):
    """A handler that keeps averages of the weights, such as EMA."""

    def in_place(self) -> AbstractContextManager[None]:
        """Put the averages in place of the weights."""

    def swap(self, engine: Engine) -> None:
        """Put them in place until the innermost region ends, with statistics that belong to them."""

    def parameter_copies(self) -> Mapping[str, Tensor]:
        """The averages by name; empty before the first one."""


def check_average(where: str, average: Any) -> str | Literal[False] | None:
    """Check an ``average=`` argument.

    Raises:
        TypeError: If it is not a name, False or None.
    """
    if average is None or average is False or (isinstance(average, str) and average):
        return average
    raise TypeError(
        f"{where}(average={average!r}): expected the name of an averaging handler, such as 'ema', or False for the weights "
        "themselves"
    )


def find_averaging(engine: Engine, average: str | Literal[False] | None, where: str) -> Averaging | None:
    """The handler whose averages are exported; None for the weights themselves.

    Args:
        engine: The engine.
        average: Its name; by default the only one that there is. False for the weights themselves.
        where: Caller, for messages.

    Raises:
        ValueError: For a name that no averaging handler has, or None where there are several.
    """
    found: dict[str, Any] = {name: one for name, one in engine.handlers.items() if one.enabled and _averages(one)}
    names = ", ".join(map(repr, found))
    if average is None and len(found) > 1:
        raise ValueError(
            f"{where}: several handlers keep averages of the weights: {names}; choose one of them, such as "
            f"average={next(iter(found))!r}, or export the weights themselves with average=False"
        )
    if isinstance(average, str) and average not in found:
        raise ValueError(
            f"{where}: average={average!r} is not an attached handler that averages weights; attached averaging "
            f"handlers: {names or 'none'}"
        )
    if average is False or not found:
        return None
    averaging: Averaging = found[average or next(iter(found))]
    return averaging


def _averages(handler: object) -> bool:
    """Whether a handler is an `Averaging`."""
    return all(callable(getattr(handler, name, None)) for name in ("in_place", "swap"))


@contextmanager
def averages_in_place(engine: Engine, average: str | Literal[False] | None, where: str) -> Iterator[None]:
    """Put the averages that are exported in place of the weights, for the ``with`` block.

    Raises:
        ValueError: As `find_averaging`, and for averages that were asked for by name and do not exist yet.
    """
    averaging = find_averaging(engine, average, where)
    _report_own_parameters(engine, where)
    if averaging is None:
        with weights_to_evaluate(engine):
            yield
        return
    with engine.regions.region():
        averaging.swap(engine)
        if average and not averaging.parameter_copies():
            raise ValueError(
                f"{where}: {average!r} has no averages yet; export after the optimizer step at which the handler "
                "starts averaging"
            )
        yield


def _report_own_parameters(engine: Engine, where: str) -> None:
    """Report trained tensors in no module, which an exported file of the model has no place for."""
    if own := own_parameters(engine):
        engine.findings.report(
            "W39",
            f"{where}: the file contains the models, but not these parameters, which belong to no module of the engine: "
            f"{', '.join(own)}",
            "make these parameters part of a model, or save them with Checkpoint or engine.weights()",
            key="own parameters",
        )
