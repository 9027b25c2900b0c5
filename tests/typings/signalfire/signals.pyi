from engine.signals import *
