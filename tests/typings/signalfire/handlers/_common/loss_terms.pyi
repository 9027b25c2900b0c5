from handlers._common.loss_terms import *
