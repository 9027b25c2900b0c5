from handlers._common.metric_names import *
