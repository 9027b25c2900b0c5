"""Dropout that is computed where the mode of the model does not ask for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from signalfire import Engine, Events, Update
from signalfire.findings.dropout import ActiveDropout
from signalfire.handlers import Guards, MixedPrecision


def test_dropout_is_seen_only_where_it_drops() -> None:
    def seen(*, p: float, training: bool) -> bool:
        with ActiveDropout() as watch:
            dropout(torch.ones(4), p, training)
        return bool(watch.seen)

    x = torch.ones(1, 2, 4)
    assert seen(p=0.5, training=True)
    assert not seen(p=0.5, training=False)
    assert not seen(p=0.0, training=True)
    with ActiveDropout() as watch:
        nn.Dropout(0.5).eval()(torch.ones(4))
        torch.randn(3)
        scaled_dot_product_attention(x, x, x)
    assert not watch.seen
    with ActiveDropout() as watch:
        scaled_dot_product_attention(x, x, x, dropout_p=0.1)
    assert watch.seen


@pytest.mark.parametrize("guards", [False, True])
def test_the_first_batch_of_an_evaluation_is_that_of_a_plain_loop_where_attention_is_fused_in_eval_mode(
    guards: bool,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(), nn.Linear(80, 1))
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(64, 5, 16, generator=generator), torch.randn(64, 1, generator=generator)) for _ in range(3)]
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # where the two ways differ most
        expected = [F.mse_loss(model(x), y).item() for x, y in batches]
    evaluator = Engine(Update.supervised(F.mse_loss).evaluation(), model=model)
    losses: list[float] = []
    evaluator.connect(Events.ITERATION_COMPLETED, lambda engine: losses.append(float(engine.loss)))
    evaluator.attach(MixedPrecision("bf16"), *([Guards()] if guards else []))
    evaluator.run(batches)
    assert losses == expected
