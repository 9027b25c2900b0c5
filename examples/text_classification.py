"""Classify passages of Python's help topics with a small BERT of Hugging Face's,
trained from scratch.

    # half a minute on one core; needs transformers
    python examples/text_classification.py
    python examples/text_classification.py --epochs 3

The topics come with Python (`help("compound")`), so that nothing is downloaded. Each is
cut into passages of 24 words, and the task is to say which of five topics a passage is
from. The model returns its loss and takes its batch by keyword: `Update.from_model`
trains it as it is. Batches are the tokenizer's `BatchEncoding`, padded to the longest
passage; `samples="labels"` counts passages, not words.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    get_scheduler,
)

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import (
    Accuracy,
    GradientClipping,
    LRScheduling,
    ProgressBar,
    Validation,
)

NAMES = ["compound", "formatstrings", "specialnames", "string-methods", "typesseq"]
WORDS = 24  # in a passage
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def passages(seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Passages with the number of their topic: four fifths to train on, and the "
    "rest."""
    found = []
    for label, name in enumerate(NAMES):
        words = topics[name].split()
        found += [
            (" ".join(words[i : i + WORDS]), label)
            for i in range(0, len(words) - WORDS, WORDS)
        ]
    order = torch.randperm(
        len(found), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    cut = len(found) * 4 // 5
    return [found[i] for i in order[:cut]], [found[i] for i in order[cut:]]


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Whole words that occur twice or more."""
    counts = Counter(
        word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)
    )
    words = [*SPECIAL, *(word for word, count in counts.most_common() if count > 1)]
    tokenizer = Tokenizer(
        WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    )


def loader(
    samples: list[tuple[str, int]], tokenizer: PreTrainedTokenizerFast, *, train: bool
) -> DataLoader[Any]:
    def collate(batch: list[tuple[str, int]]) -> Any:
        texts, labels = zip(*batch, strict=True)
        return tokenizer(list(texts), padding=True, return_tensors="pt") | {
            "labels": torch.tensor(labels)
        }

    return DataLoader(samples, 32, shuffle=train, collate_fn=collate)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Classify passages of Python's help topics."
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(arguments.seed)
    training, held_out = passages(arguments.seed)
    tokenizer = tokenizer_of([text for text, _ in training])
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            num_labels=len(NAMES),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=128,
        )
    )
    update = Update.from_model(
        torch.optim.AdamW, lr=1e-3, weight_decay=0.01, samples="labels"
    )
    trainer = Engine(update, model=model, seed=arguments.seed)
    trainer.attach(
        LRScheduling(partial(get_scheduler, "linear", num_warmup_steps=20)),
        GradientClipping(max_norm=1.0),
        Validation(loader(held_out, tokenizer, train=False), accuracy=Accuracy()),
        ProgressBar(),
    )
    trainer.run(loader(training, tokenizer, train=True), max_epochs=arguments.epochs)
    accuracy = trainer.state.metrics["val_accuracy"]
    print(
        f"{len(training)} passages of {len(NAMES)} topics: accuracy {accuracy:.1%} on "
        f"{len(held_out)} others"
    )


if __name__ == "__main__":
    main()
