from engine.__main__ import *
