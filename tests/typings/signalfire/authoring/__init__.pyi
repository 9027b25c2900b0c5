from engine.authoring import *
