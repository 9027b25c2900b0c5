from engine.models import *
