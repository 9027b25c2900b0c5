from handlers._common.torchmetrics import *
