from engine.ablation.provenance import *
