from engine.authoring.elsewhere import *
