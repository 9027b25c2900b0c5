from handlers._common.metric_reports import *
