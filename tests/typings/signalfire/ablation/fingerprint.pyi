from engine.ablation.fingerprint import *
