from engine.core.signals import *
