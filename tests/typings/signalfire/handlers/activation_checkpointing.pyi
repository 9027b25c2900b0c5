from handlers.activation_checkpointing import *
