from handlers._common.new_values import *
