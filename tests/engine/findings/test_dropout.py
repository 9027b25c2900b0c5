"""Dropout that is computed where the mode of the model does not ask for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from signalfire.findings.dropout import ActiveDropout


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
