"""What the engine costs where the work is real: a decoder-only transformer, beside the same plain PyTorch loop.

    python tests/benchmarks/transformer.py [--device cuda] [--compile] [--rounds 20]
    python tests/benchmarks/transformer.py --device cpu --small

135 million parameters, bfloat16 by autocast, a fused AdamW, a clip by norm and a schedule that moves with every step. Both
loops copy their batches from pinned memory. They take turns in short rounds, each of which ends when the device is idle;
times are medians over the rounds with the quartiles, and the ratio is the median of that of neighboring rounds.

All weights of the two have to be the same, bit for bit: the engine does the same work, or the times mean nothing. On the CPU that
is looked at in the end. On a GPU the quick kernels of attention add up in any order; so there it is looked at after a first
round with deterministic ones, which is not timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import figures
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from signalfire import Engine, Update
from signalfire.handlers import DeviceTransfer, GradientClipping, LRScheduling, MixedPrecision

Batch = tuple[Tensor, Tensor]
AIM = 1.01


@dataclass(frozen=True)
class Size:
    """The model and its batches; widths in features, lengths in tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    samples: int
    iterations: int  # in a round


LARGE = Size(layers=12, width=768, heads=12, vocabulary=32_000, length=512, samples=8, iterations=20)
SMALL = Size(layers=2, width=64, heads=4, vocabulary=500, length=32, samples=4, iterations=20)


class Block(nn.Module):
    """Attention to what came before, then a perceptron; each on normalized features, and added to them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = nn.Linear(size.width, 3 * size.width)
        self.joined = nn.Linear(size.width, size.width)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, features: Tensor) -> Tensor:
        samples, length, width = features.shape
        joint = self.attention(self.before_attention(features)).view(samples, length, 3, self.heads, -1)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        features = features + self.joined(attended.transpose(1, 2).reshape(samples, length, width))
        perceived: Tensor = features + self.perceptron(self.before_perceptron(features))
        return perceived


class Decoder(nn.Module):
    """Scores for the next token at each place."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.places = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.normalized = nn.LayerNorm(size.width)
        self.scores = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        scores: Tensor = self.scores(self.normalized(self.blocks(features)))
        return scores


def next_token_loss(scores: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def make_model(size: Size, *, compile_it: bool) -> Any:
    torch.manual_seed(0)
    model = Decoder(size)
    return torch.compile(model) if compile_it else model


def make_data(size: Size, *, pinned: bool) -> list[Batch]:
    """The batches of one round; what follows a token is to be predicted."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(size.iterations):
        text = torch.randint(size.vocabulary, (size.samples, size.length + 1), generator=generator)
        batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        data.append((batch[0].pin_memory(), batch[1].pin_memory()) if pinned else batch)
    return data


AdamW = partial(torch.optim.AdamW, lr=3e-4, weight_decay=0.1, fused=True)
Schedule = partial(LinearLR, start_factor=0.01, total_iters=1000)


def plain_loop(
    size: Size, data: list[Batch], device: torch.device, *, compile_it: bool
) -> tuple[Any, Callable[[], Any]]:
    model = make_model(size, compile_it=compile_it).to(device)
    optimizer = AdamW(model.parameters())
    schedule = Schedule(optimizer)
    parameters = list(model.parameters())

    def run() -> None:
        for tokens, following in data:
            tokens = tokens.to(device, non_blocking=True)
            following = following.to(device, non_blocking=True)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = next_token_loss(model(tokens), following)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return model, run


def with_signalfire(
    size: Size, data: list[Batch], device: torch.device, *, compile_it: bool
) -> tuple[Any, Callable[[], Any]]:
    model = make_model(size, compile_it=compile_it)
    trainer = Engine(Update.supervised(next_token_loss, AdamW), model=model, seed=0)
    trainer.attach(
        DeviceTransfer(device),
        MixedPrecision("bf16"),
        GradientClipping(max_norm=1.0),
        LRScheduling(Schedule),
    )
    return model, lambda: trainer.run(data, max_epochs=trainer.state.epoch + 1)


def run_deterministically(variants: dict[str, Callable[[], Any]]) -> None:
    """One round of each, in which the same computation gives the same bits."""
    torch.use_deterministic_algorithms(True)
    try:
        for run in variants.values():
            run()
    finally:
        torch.use_deterministic_algorithms(False)


def measure(
    variants: dict[str, Callable[[], Any]], device: torch.device, iterations: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds an iteration for every round; who goes first alternates."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, run in list(variants.items())[:: 1 if number % 2 else -1]:
            gc.collect()
            wait_for(device)
            began = time.perf_counter()
            run()
            wait_for(device)
            if number > 0:  # the first round compiles, and fills the memory's caches
                times[name].append((time.perf_counter() - began) / iterations * 1e6)
    return times


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(one: nn.Module, other: nn.Module, when: str) -> None:
    """Say that all weights are the same, bit for bit; end the program if they are not."""
    others = other.state_dict()
    names = [name for name, value in one.state_dict().items() if not torch.equal(value, others[name])]
    if names:
        raise SystemExit(f"{when} {len(names)} weights differ, {names[0]} among them")
    print(f"{when} all weights of both are the same, bit for bit")


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:12.3f}  [{low:.3f}, {high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a model of 0.2 million parameters, as for a CPU")
    parser.add_argument("--compile", action="store_true", help="compile the model of both loops")
    parser.add_argument("--rounds", type=int, default=20, help="two or more")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds={options.rounds}: quartiles need two rounds or more")
    device = torch.device(options.device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for
    if device.type == "cpu":
        torch.set_num_threads(1)
    size = SMALL if options.small else LARGE
    data = make_data(size, pinned=device.type == "cuda")
    reference, run_plain_loop = plain_loop(size, data, device, compile_it=options.compile)
    model, run_with_signalfire = with_signalfire(size, data, device, compile_it=options.compile)
    count = sum(parameter.numel() for parameter in model.parameters())
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{count / 1e6:.1f} million parameters, {size.samples} x {size.length} tokens a batch, {where}")

    variants = {"plain loop": run_plain_loop, "Signalfire": run_with_signalfire}
    run_deterministically(variants)
    compare(reference, model, "after a deterministic round")
    times = measure(variants, device, size.iterations, options.rounds)
    print(f"{'':16}{'us an iteration  [quartiles]':>36}")
    for name in variants:
        print(f"{name:16}{spread(times[name])}")
    ratios = [mine / bare for bare, mine in zip(*times.values(), strict=True)]
    print(f"{'ratio':16}{spread(ratios)}")
    if device.type == "cpu":
        compare(reference, model, "in the end")


if __name__ == "__main__":
    figures.run(main)
