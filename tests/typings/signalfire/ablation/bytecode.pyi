from engine.ablation.bytecode import *
