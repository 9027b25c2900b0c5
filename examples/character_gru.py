"""A character GRU with truncated back-propagation through time, on the documentation that every Python brings along.

    python examples/character_gru.py                 # less than a minute on one core
    python examples/character_gru.py --steps 200     # less of it
    python examples/character_gru.py --list          # the wiring: which handler listens to what, in which order

The text is that of ``help("assignment")`` and all other topics: the paragraphs of `pydoc_data.topics`, each once, some 375,000
characters. The last tenth is held out. A batch has 32 sequences of 500 characters; `TruncatedBPTT` takes it in chunks of 50,
each of which is a step of the optimizer, and hands the hidden state from chunk to chunk.

Source: Williams and Peng, "An efficient gradient-based algorithm for on-line training of recurrent network trajectories" (Neural
Computation, 1990)
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Average,
    GradientClipping,
    History,
    LRScheduling,
    Metrics,
    ProgressBar,
    Seeding,
    TruncatedBPTT,
    Validation,
    cosine_with_warmup,
)

STEPS, SEQUENCES, LENGTH, CHUNK, UNITS = 600, 32, 500, 50, 192


class CharacterGRU(nn.Module):
    """Embedded characters, one layer of GRU cells, and the logits of the next character."""

    def __init__(self, characters: int, units: int = UNITS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 64)
        self.gru = nn.GRU(64, units, batch_first=True)
        self.linear = nn.Linear(units, characters)

    def forward(self, indices: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Indices of shape (N, T) to logits of shape (N, T, characters), and the hidden state of shape (1, N, units)."""
        output, hidden = self.gru(self.embedding(indices), hidden)
        return self.linear(output), hidden


def load_text() -> str:
    """The paragraphs of Python's help topics, in the order of the topics; what several topics share comes once."""
    paragraphs = (part for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip())
    return "\n\n".join(dict.fromkeys(paragraphs))


def batches(indices: Tensor, sequences: int) -> DataLoader[Any]:
    """Batches of (characters, next characters), each of shape (sequences, LENGTH); a rest that fills no sequence is left out."""
    count = (len(indices) - 1) // LENGTH
    inputs, targets = (indices[shift : shift + count * LENGTH].view(count, LENGTH) for shift in (0, 1))
    return DataLoader(TensorDataset(inputs, targets), batch_size=sequences, shuffle=True, generator=torch.Generator())


def forward(engine: Engine, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The logits; the hidden state goes on to the next chunk. Without chunks, it begins at None for every batch."""
    update = engine.state.update
    logits, hidden = engine.model(batch[0], update.hidden)
    if update.more:
        update.hidden = hidden
    return logits  # type: ignore[no-any-return]


def loss(engine: Engine, logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean cross-entropy of the next characters, in bits."""
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()) / math.log(2)


def build(characters: int, held_out: DataLoader[Any], *, seed: int) -> Engine:
    """Compose the trainer. The order in which handlers are attached does not matter."""
    seed_everything(seed)
    model = CharacterGRU(characters)
    update = Update(forward, loss, partial(torch.optim.Adam, lr=6e-3))

    evaluator = Engine(update.evaluation(), model=model)
    evaluator.attach(Metrics(bits=Average()))

    trainer = Engine(update, model=model, seed=seed)
    trainer.attach(
        Seeding(),
        TruncatedBPTT(CHUNK),
        Metrics(train_bits=Average()),
        Validation(evaluator, held_out, every="100st"),
        GradientClipping(max_norm=1.0),
        LRScheduling(cosine_with_warmup(warmup=0.05, min_factor=0.02)),
        History(),
        ProgressBar(["train_bits", "bits"]),
    )
    return trainer


@torch.no_grad()
def sample(model: CharacterGRU, alphabet: str, *, start: str, length: int, seed: int, temperature: float = 0.6) -> str:
    """Text that the model writes after ``start``; smaller temperatures make it more careful."""
    generator = torch.Generator().manual_seed(seed)
    logits, hidden = model(torch.tensor([[alphabet.index(character) for character in start]]))
    written = start
    for _ in range(length):
        probabilities = (logits[0, -1] / temperature).softmax(0)
        index = torch.multinomial(probabilities, 1, generator=generator)
        written += alphabet[int(index)]
        logits, hidden = model(index.view(1, 1), hidden)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a character GRU on Python's help topics by truncated BPTT.")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps, one for each chunk")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "character-gru", help="where the picture goes")
    parser.add_argument("--list", action="store_true", help="print the wiring and stop")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    text = load_text()
    alphabet = "".join(sorted(set(text)))
    position = {character: index for index, character in enumerate(alphabet)}
    indices = torch.tensor([position[character] for character in text])
    split = len(indices) * 9 // 10
    train_data, held_out = batches(indices[:split], SEQUENCES), batches(indices[split:], 1000)
    trainer = build(len(alphabet), held_out, seed=arguments.seed)
    if arguments.list:
        print(trainer)
        return
    began = time.perf_counter()
    trainer.run(train_data, max_steps=arguments.steps)
    seconds = time.perf_counter() - began

    history = trainer.handlers["history"]
    assert isinstance(history, History)
    print(f"\n{trainer.updates[0].steps} optimizer steps in {seconds:.0f} s")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if "bits" in history.names:
        best, last = min(history["bits"]), history["bits"][-1]
        print(
            f"held-out text: {last:.3f} bits per character (best {best:.3f}; {math.log2(len(alphabet)):.2f} by guessing)\n"
        )
        history.plot(arguments.folder / "learning_curve.png", "train_bits,bits")
        print(f"  {arguments.folder / 'learning_curve.png'}\n")
    print(sample(trainer.modules["model"], alphabet, start="The ", length=600, seed=arguments.seed))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
