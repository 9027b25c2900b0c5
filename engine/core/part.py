"""The base class of an engine's parts: each provides one service, and alone writes its private fields."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from .kernel import Kernel

__all__ = ["Part", "Reference"]


E = TypeVar("E", bound="Kernel")


class Part(Generic[E]):
    """One service of an engine. It holds the engine weakly, so that both are freed together, without the garbage collector."""

    def __init__(self, engine: E) -> None:
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> E:
        """The engine that this is a part of."""
        engine = self._engine()
        if engine is None:
            raise ReferenceError(f"the engine of this {type(self).__name__} no longer exists")
        return engine


class Reference:
    """A weak reference for hooks on modules, which are copied and pickled with these: what is copied knows no engine."""

    def __init__(self, engine: Kernel | None = None) -> None:
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self) -> Any:
        return None if self._engine is None else self._engine()

    def __reduce__(self) -> tuple[type[Reference], tuple[()]]:
        return Reference, ()
