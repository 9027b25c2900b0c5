from engine.findings.worker_batches import *
