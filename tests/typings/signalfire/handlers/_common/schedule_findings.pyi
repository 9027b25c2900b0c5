from handlers._common.schedule_findings import *
