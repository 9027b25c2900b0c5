"""Classify graphs with PyTorch Geometric: which of two small shapes is hidden in a
random graph, a house or a ring of five nodes?

    python examples/graphs.py  # half a minute on one core; needs torch_geometric

PyTorch Geometric makes the graphs itself (Barabasi-Albert graphs of 20 nodes, to which
one of the shapes is attached), so that nothing is downloaded. Its loader joins several
graphs to one large graph, a `Batch`, which the engine takes as it is:
`samples="num_graphs"` counts graphs, not nodes. All nodes have the same feature, so
that only the connections tell the shapes apart.

Source: Luo et al., "Parameterized Explainer for Graph Neural Network" (NeurIPS 2020),
for the data, BA-2motifs; Xu et al., "How Powerful are Graph Neural Networks?" (ICLR
2019), for the network.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.datasets import ExplainerDataset
from torch_geometric.datasets.graph_generator import BAGraph
from torch_geometric.datasets.motif_generator import CycleMotif, HouseMotif
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import EMA, Accuracy, LRScheduling, ProgressBar, Validation


class Network(nn.Module):
    """Three rounds in which each node adds up its neighbors; then the sum over the
    nodes of a graph.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rounds = nn.ModuleList(
            GINConv(
                nn.Sequential(
                    nn.Linear(inputs, width),
                    nn.BatchNorm1d(width),
                    nn.ReLU(),
                    nn.Linear(width, width),
                )
            )
            for inputs in (1, width, width)
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        for one in self.rounds:
            x = one(x, edge_index).relu()
        logits: Tensor = self.head(global_add_pool(x, batch))
        return logits


def graphs(number: int) -> list[Any]:
    """As many graphs with a house (class 0) as with a ring (class 1)."""
    found = []
    for label, motif in enumerate((HouseMotif(), CycleMotif(5))):
        for graph in ExplainerDataset(
            BAGraph(20, 1), motif, num_motifs=1, num_graphs=number // 2
        ):
            graph.x, graph.y = torch.ones(graph.num_nodes, 1), torch.tensor([label])
            found.append(graph)
    return found


def forward(engine: Engine, batch: Any) -> Tensor:
    logits: Tensor = engine.model(batch.x, batch.edge_index, batch.batch)
    return logits


def loss(engine: Engine, output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch.y)


def main() -> None:
    parser = argparse.ArgumentParser(description="Classify graphs.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(arguments.seed)
    training, held_out = graphs(600), graphs(200)
    model = Network()
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    update = Update(forward, loss, adam, target="y", samples="num_graphs")
    trainer = Engine(update, model=model, seed=arguments.seed)
    trainer.attach(
        LRScheduling(partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2)),
        EMA(0.98),
        Validation(DataLoader(held_out, 50), accuracy=Accuracy()),
        ProgressBar(),
    )
    trainer.run(DataLoader(training, 50, shuffle=True), max_epochs=arguments.epochs)
    print(
        f"{len(training)} graphs: accuracy {trainer.state.metrics['val_accuracy']:.1%} "
        f"on {len(held_out)} others"
    )


if __name__ == "__main__":
    main()
