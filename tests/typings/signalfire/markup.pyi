from engine.markup import *
