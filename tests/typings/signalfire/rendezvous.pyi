from engine.rendezvous import *
