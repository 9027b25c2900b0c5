from handlers._common.operations import *
