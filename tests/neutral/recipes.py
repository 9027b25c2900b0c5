"""Training programs of other people, written anew by their meaning, each beside an Engine: the same bits, and how long it takes.

Source: nanoGPT, https://github.com/karpathy/nanoGPT, its train.py and model.py, smaller and on the help topics of Python. It
draws the offsets of its batches from the global generator; here they have one of their own, in both programs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from signalfire import Engine, Events, Update
from signalfire.handlers import GradientAccumulation, GradientClipping, LRScheduling, cosine_with_warmup

from .outcomes import Outcome, judged, same

__all__ = ["of_nanogpt", "time_of_nanogpt"]

LAYERS, HEADS, WIDTH, CONTEXT, BATCH, DROPOUT = 4, 4, 64, 32, 8, 0.1
STEPS, ACCUMULATED, WARMUP, RATE, LOWEST, CLIP, DECAY = 200, 2, 20, 1e-3, 0.1, 1.0, 0.1

TEXT = "".join(topics.topics[name] for name in sorted(topics.topics))
CHARACTERS = sorted(set(TEXT))


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a layer norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        projected = self.qkv(self.norm(x)).split(WIDTH, dim=2)
        q, k, v = (one.view(batch, length, HEADS, -1).transpose(1, 2) for one in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=DROPOUT if self.training else 0.0)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        y: Tensor = x + self.drop(self.down(F.gelu(self.up(self.second_norm(x)))))
        return y


class GPT(nn.Module):
    """Logits of the next character at each position; the embedding is also the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                deeper = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if deeper else 0.02)

    def forward(self, indices: Tensor) -> Tensor:
        x = self.drop(self.characters(indices) + self.places(torch.arange(indices.shape[1])))
        return F.linear(self.norm(self.blocks(x)), self.characters.weight)


class Windows:
    """Batches of windows of the text at random offsets, each with the window one character further on."""

    def __init__(self, steps: int) -> None:
        numbers = {character: number for number, character in enumerate(CHARACTERS)}
        self.text = torch.tensor([numbers[character] for character in TEXT])
        self.generator = torch.Generator().manual_seed(1337)
        self.length = steps * ACCUMULATED

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.length):
            offsets = torch.randint(len(self.text) - CONTEXT, (BATCH,), generator=self.generator).tolist()
            windows = torch.stack([self.text[offset : offset + CONTEXT + 1] for offset in offsets])
            yield windows[:, :-1], windows[:, 1:]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step: int, steps: int) -> float:
    """A linear warm-up, then a cosine down to a tenth of the highest rate."""
    if step < WARMUP:
        return RATE * ((step + 1) / (WARMUP + 1))
    progress = (step - WARMUP) / (steps - WARMUP)
    return RATE * (LOWEST + (1 - LOWEST) * ((1 + math.cos(math.pi * progress)) / 2))


def by_plain_loop(steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(1337)
    model, data = GPT(), iter(Windows(steps))
    optimizer = torch.optim.AdamW(groups_of(model), lr=RATE, betas=(0.9, 0.99))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        for _ in range(ACCUMULATED):
            inputs, targets = next(data)
            loss = loss_of(model(inputs), targets) / ACCUMULATED
            loss.backward()
        # In the order of the groups, in which an Engine sums up the norm: the sum of the model's order ends with other bits.
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            losses.append(loss.item() * ACCUMULATED)
    return model, losses


def by_engine(steps: int) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(1337)
    model = GPT()
    adamw = partial(torch.optim.AdamW, lr=RATE, betas=(0.9, 0.99))
    update = Update.supervised(loss_of, adamw, parameters=lambda engine: groups_of(engine.model))
    engine = Engine(update, model=model, seed=0)
    engine.attach(
        GradientAccumulation(ACCUMULATED),
        GradientClipping(max_norm=CLIP),
        LRScheduling(cosine_with_warmup(warmup=WARMUP, min_factor=LOWEST)),
    )
    losses: list[float] = []
    engine.connect(
        Events.ITERATION_COMPLETED(every=10 * ACCUMULATED),
        lambda engine: losses.append(engine.state.update.loss.item()),
    )
    engine.run(Windows(steps), max_epochs=1, check=False)
    return model, losses


def check(steps: int) -> str | None:
    ours, our_losses = by_engine(steps)
    theirs, losses = by_plain_loop(steps)
    if our_losses != losses or not same(ours.parameters(), theirs.parameters()):
        return "differs from the plain loop"
    return None if losses[-1] < losses[0] - 0.5 else f"it does not learn: {losses[0]:.2f} to {losses[-1]:.2f}"


def of_nanogpt() -> list[Outcome]:
    """200 steps with accumulation, clipping, warm-up and cosine: the weights bit for bit."""
    return [judged("train.py", partial(check, STEPS))]


def time_of_nanogpt(turns: int = 7, steps: int = 30) -> float:
    """Time of the engine over that of the plain loop: the median over pairs of runs, of which either is first in turn."""
    ratios = []
    for turn in range(turns):
        seconds = {}
        for program in (by_engine, by_plain_loop) if turn % 2 else (by_plain_loop, by_engine):
            start = time.process_time()
            program(steps)
            seconds[program] = time.process_time() - start
        ratios.append(seconds[by_engine] / seconds[by_plain_loop])
    return statistics.median(ratios)
