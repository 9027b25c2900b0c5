"""Advantage actor-critic: an optimizer for each of two networks, trained on episodes
that the actor plays.

Prints the mean discounted return of the last episodes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from signalfire import Engine, Update, seed_everything
from signalfire.handlers import CSVLogger, GradientClipping, ProgressBar, Seeding

WALKERS, PLACES, STEPS = 64, 8, 20


class Episodes:
    """Endless batches of (places, actions, returns): walkers on a slippery line are
    rewarded at its last place.
    """

    def __init__(self, actor: nn.Module) -> None:
        self.actor = actor

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            yield self.play()

    @torch.no_grad()
    def play(self) -> tuple[Tensor, ...]:
        place = torch.zeros(WALKERS, dtype=torch.long)
        record = []
        for _ in range(STEPS):
            seen = nn.functional.one_hot(place, PLACES).float()
            action = Categorical(logits=self.actor(seen)).sample()
            slips = torch.rand(WALKERS) < 0.1
            place = (place + torch.where(slips, 1 - action, action) * 2 - 1).clamp(
                0, PLACES - 1
            )
            record.append((seen, action, (place == PLACES - 1).float()))
        places, actions, rewards = (
            torch.stack(one) for one in zip(*record, strict=True)
        )
        returns = torch.zeros_like(rewards)
        later = torch.zeros(WALKERS)
        for step in reversed(range(STEPS)):
            later = rewards[step] + 0.95 * later
            returns[step] = later
        return places, actions, returns


def critic_loss(engine: Engine, batch: Any) -> Tensor:
    places, _, returns = batch
    return nn.functional.mse_loss(engine.model["critic"](places).squeeze(-1), returns)


def actor_loss(engine: Engine, batch: Any) -> Tensor:
    places, actions, returns = batch
    advantage: Tensor = (returns - engine.model["critic"](places).squeeze(-1)).detach()
    engine.log("return", returns[0].mean())
    likely: Tensor = Categorical(logits=engine.model["actor"](places)).log_prob(actions)
    return -(likely * advantage).mean()


seed_everything(0)
actor = nn.Sequential(nn.Linear(PLACES, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(PLACES, 32), nn.Tanh(), nn.Linear(32, 1))
updates = [
    Update.from_function(
        critic_loss, torch.optim.Adam, lr=1e-2, name="critic", parameters="critic"
    ),
    Update.from_function(
        actor_loss, torch.optim.Adam, lr=1e-2, name="actor", parameters="actor"
    ),
]
trainer = Engine(updates, {"actor": actor, "critic": critic}, seed=0)
trainer.attach(
    Seeding(), GradientClipping(1.0), CSVLogger("runs/log.csv"), ProgressBar()
)
state = trainer.run(Episodes(actor), max_iters=150)
print(f"return: {state.metrics['return']:.6f}")
