"""A small transformer on Python's help topics, byte by byte: accumulation, bfloat16,
clipping, and samples of what it writes.

Prints what `check` finds before the run, a sample every 200 iterations, and the loss
and perplexity of held-out text at the end.
"""

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from signalfire import Engine, Events, Phase, Update, seed_everything
from signalfire.handlers import (
    Checkpoint,
    CSVLogger,
    GradientAccumulation,
    GradientClipping,
    LRScheduling,
    MixedPrecision,
    Perplexity,
    ProgressBar,
    Throughput,
    Validation,
    cosine_with_warmup,
)

LENGTH, WIDTH = 32, 32
text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
split = len(text) * 9 // 10


def windows(part: Tensor, size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    count = (len(part) - 1) // LENGTH
    inputs, targets = (
        part[start : start + count * LENGTH].view(count, LENGTH) for start in (0, 1)
    )
    return DataLoader(TensorDataset(inputs, targets), batch_size=size, shuffle=shuffle)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        embedded = self.tokens(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.body(embedded, mask=mask, is_causal=True))
        return logits


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


seed_everything(0)
train = windows(text[:split], 8, shuffle=True)
val = windows(text[split:][: 64 * LENGTH * 4 + 1], 64)
update = Update.supervised(loss, torch.optim.AdamW, lr=3e-3)
trainer = Engine(update, LanguageModel(), seed=0)
trainer.attach(
    GradientAccumulation(4),
    GradientClipping(1.0),
    MixedPrecision("bf16"),
    LRScheduling(cosine_with_warmup(warmup=0.1)),
    Throughput(tokens=0),
    Validation(val, perplexity=Perplexity(), every="200it"),
    Checkpoint("runs/language_model", every="200it", keep=2),
    CSVLogger("runs/log.csv"),
    ProgressBar(),
)


@trainer.on(Events.ITERATION_COMPLETED(every=200), phase=Phase.RECORD)
def show_sample(engine: Engine) -> None:
    tokens = torch.tensor([list(b"The ")])
    generator = torch.Generator().manual_seed(engine.state.iteration)
    with engine.evaluating():
        for _ in range(60):
            scores = engine.model(tokens[:, -LENGTH:])[:, -1].float()
            tokens = torch.cat(
                [tokens, torch.multinomial(scores.softmax(-1), 1, generator=generator)],
                1,
            )
    print(f"[{engine.state.iteration}] {bytes(tokens[0].tolist())!r}")


print(trainer.check(train, max_iters=800))
trainer.run(train, max_iters=800)
print(trainer.state.metrics)
