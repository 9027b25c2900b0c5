"""One thread for every test: on a small shared machine, two are many times slower, and sums come out otherwise."""

import torch

torch.set_num_threads(1)
