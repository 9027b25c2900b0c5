"""Claims that several handlers share; one handler at a time may hold each. Other claims are declared by their handler."""

from __future__ import annotations

from signalfire.authoring import Claim

__all__ = [
    "ALGORITHMS",
    "CLIPPING",
    "COMPILATION",
    "CUTOUT",
    "EVALUATED_WEIGHTS",
    "FILE",
    "LEARNING_RATE",
    "PRECISION",
    "TIME_CHUNKS",
]

ALGORITHMS = Claim("how algorithms are chosen")
CLIPPING = Claim("gradient clipping")
COMPILATION = Claim("what is compiled")
CUTOUT = Claim("cutting parts out of samples")
EVALUATED_WEIGHTS = Claim("the weights used for evaluation", rehearsed=False)
FILE = Claim("the file", of_step=False)
LEARNING_RATE = Claim("the learning rate", rehearsed=False)
PRECISION = Claim("the precision", inherited=True)
TIME_CHUNKS = Claim("the time chunks")
