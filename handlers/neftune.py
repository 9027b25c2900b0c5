"""NEFTune: noise on the embeddings while a language model is fine-tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalfire import Engine, Events, Handler, Phase, on
from signalfire.authoring import Capture, Claim, check_name, check_number

from ._common.batches import check_place, tensor_at
from ._common.draws import Draws
from ._common.hooks import check_not_compiled, named_modules
from ._common.ranks import ADD_EMBEDDING_NOISE

__all__ = ["NEFTune"]


class NEFTune(Handler):
    """NEFTune: adds uniform noise to the embeddings while fine-tuning a language model.

    The noise has magnitude ``alpha / sqrt(L * d)`` for embeddings of shape (N, L, d). A model that is fine-tuned on little text
    then repeats that text's wording less often. Evaluations and embeddings in eval mode get no noise. With a mask, L is each
    sample's number of tokens, and padding gets no noise, as in the paper. Without a mask, L is the length of the batch, as in
    TRL.

    The noise depends on the run's seed, the iteration, the forward within it and the rank. It is drawn on the embedding's device,
    and stays the same when activation checkpointing recomputes the forward. The hook is on the embedding only during an update.

    Args:
        alpha: Scale of the noise; the paper uses 5, 10 and 15.
        embedding: Path of the embedding, such as "model.embed_tokens". By default that of ``get_input_embeddings()``, which
            Hugging Face models have, or else the only ``nn.Embedding``.
        mask: Mask of shape (N, L) of the tokens that are not padding: its index or key in the batch, such as "attention_mask", or
            a function of the batch.

    Raises:
        ValueError: At the start of a run, if the embedding is not found, or if the model is compiled, because compiled models
            skip hooks; in the first forward, if it does not call the embedding.

    Source:
        Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning" (ICLR 2024), Algorithm 1.

    Example:
        >>> import torch
        >>> from signalfire import Engine, Events, Update
        >>> update = Update.supervised(torch.nn.functional.mse_loss, torch.optim.SGD, lr=0.1)
        >>> engine = Engine(update, model=torch.nn.Sequential(torch.nn.Embedding(10, 8)), seed=0)
        >>> _ = torch.nn.init.zeros_(engine.model[0].weight)  # what comes out is the noise
        >>> # Up to 4 / sqrt(2 * 8) for two tokens of 8 dimensions.
        >>> _ = engine.attach(NEFTune(4, mask=2))
        >>> @engine.on(Events.FORWARD_COMPLETED)
        ... def show(engine):
        ...     noise = engine.state.update.output.abs().amax(dim=-1)
        ...     print((noise > 0).tolist(), (noise <= 1).all().item())
        >>> tokens, mask = torch.tensor([[5, 6, 0]]), torch.tensor([[1, 1, 0]])
        >>> _ = engine.run([(tokens, torch.ones(1, 3, 8), mask)], max_epochs=1)
        [[True, True, False]] True
    """

    by_shard = True
    capture = Capture.FORBIDDEN
    trains = True

    def __init__(
        self,
        alpha: float = 5.0,
        *,
        embedding: str | None = None,
        mask: int | str | Callable[[Any], Tensor] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.alpha = check_number(self, "alpha", alpha, above=0)
        self.embedding = check_name(self, "embedding", embedding)
        self.mask = mask if mask is None or callable(mask) else check_place(self, "mask", mask)
        self._draws = Draws()
        self._module: nn.Module | None = None
        self._called = False  # whether a forward of this run has called the embedding

    def attached(self, engine: Engine) -> None:
        engine.overrides.claim(Claim("the noise added to embeddings"), by=self)

    @on(Events.STARTED, phase=Phase.PREPARE, reads=["modules"], writes=[])
    def find_embedding(self, engine: Engine) -> None:
        """Find the embedding."""
        check_not_compiled(self, engine)
        self._module, self._called = self._find(engine), False
        self._draws.restart()

    @on(Events.UPDATE_STARTED, rank=ADD_EMBEDDING_NOISE, reads=[], writes=["modules"])
    def hook(self, engine: Engine) -> None:
        """Put the hook on the embedding until the update is complete, because the backward may recompute the forward."""
        engine.regions.enter(self._hooked(engine))

    @on(Events.FORWARD_STARTED, phase=Phase.PREPARE, reads=[], writes=[])
    def begin_forward(self, engine: Engine) -> None:
        """Use new noise for this forward."""
        self._draws.begin_forward(self, engine)

    @on(Events.UPDATE_COMPLETED, reads=[], writes=[])
    def check_called(self, engine: Engine) -> None:
        """Raise an error if the first forward has not called the embedding."""
        if self._draws.begun and not self._called and len(engine.updates) == 1:
            raise ValueError(
                f"{self.name!r}: the forward pass did not call the embedding, so no noise was added; use "
                "NEFTune(embedding=) to select an embedding that the forward pass calls, or, if you pass embeddings to the "
                "model, pass token ids instead"
            )

    @on(Events.ENDED, reads=[], writes=[])
    def release(self, engine: Engine) -> None:
        """Release the reference to the model."""
        self._module = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy does not refer to the model."""
        return super().__getstate__() | {"_module": None}

    @contextmanager
    def _hooked(self, engine: Engine) -> Iterator[None]:
        assert self._module is not None

        def add_noise(module: nn.Module, inputs: Any, output: Any) -> Any:
            self._called = True
            return self._noisy(output, engine) if module.training else None

        handle = self._module.register_forward_hook(add_noise)
        try:
            yield
        finally:
            handle.remove()

    def _noisy(self, output: Any, engine: Engine) -> Tensor:
        if not isinstance(output, Tensor) or output.dim() != 3:
            kind = type(output).__name__
            found = f"has shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"is of type {kind}"
            raise TypeError(f"{self.name!r}: the embedding's output {found}; expected a tensor of shape (N, L, d)")
        generator = self._draws.generator(output.device)
        noise = torch.empty(output.shape, device=output.device).uniform_(-1, 1, generator=generator)
        if self.mask is None:
            noise *= self.alpha / (output.shape[1] * output.shape[2]) ** 0.5
        else:
            mask = self._mask_of(engine.state.batch, output)
            lengths = mask.sum(1).clamp(min=1)
            noise *= (mask * (self.alpha / (lengths * output.shape[2]).sqrt()).unsqueeze(1)).unsqueeze(2)
        return output + noise.to(output.dtype)

    def _mask_of(self, batch: Any, output: Tensor) -> Tensor:
        mask = self.mask(batch) if callable(self.mask) else tensor_at(self, batch, "mask")
        if not isinstance(mask, Tensor) or mask.shape != output.shape[:2]:
            found = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is {mask!r}"
            raise ValueError(
                f"{self.name!r}: the mask {found}, but the embeddings have shape {tuple(output.shape)}; expected a "
                "mask of shape (N, L)"
            )
        return mask.to(output.device) != 0

    def _find(self, engine: Engine) -> nn.Module:
        named = named_modules(engine)
        embeddings = {path: part for path, part in named.items() if isinstance(part, nn.Embedding)}
        if self.embedding is not None:
            if self.embedding not in named:
                raise ValueError(
                    f"{self.name!r}: embedding={self.embedding!r} is not a module of the model; the model's embeddings "
                    f"are {_listed(embeddings)}"
                )
            return named[self.embedding]
        for module in engine.modules.values():
            find = getattr(module, "get_input_embeddings", None)
            found = find() if callable(find) else None
            if isinstance(found, nn.Module):
                return found
        if len(embeddings) != 1:
            raise ValueError(
                f"{self.name!r}: expected a model with one embedding, but found {len(embeddings)} "
                f"({_listed(embeddings)}); select the embedding with NEFTune(embedding=)"
            )
        return next(iter(embeddings.values()))


def _listed(embeddings: Iterable[str]) -> str:
    return ", ".join(map(repr, embeddings)) or "none"
