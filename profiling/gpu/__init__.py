"""GPUs: the steps of the one command that measures on them, and what is known of the kernels without one."""
