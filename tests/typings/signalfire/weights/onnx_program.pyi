from engine.weights.onnx_program import *
