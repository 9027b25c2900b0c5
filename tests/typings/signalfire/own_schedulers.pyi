from engine.own_schedulers import *
