from handlers._common.scalars import *
