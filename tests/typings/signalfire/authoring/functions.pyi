from engine.authoring.functions import *
