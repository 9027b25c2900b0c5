from handlers._common.checkpoint_findings import *
