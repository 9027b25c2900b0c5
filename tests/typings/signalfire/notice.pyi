from engine.notice import *
