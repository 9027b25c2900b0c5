from handlers._common.joint_schedule import *
