"""Training: how over- and under-approximations are joined into a loss, and the loop around it."""
