from engine.distributed.rendezvous import *
