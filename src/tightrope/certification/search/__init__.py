"""Branch and bound: complete search on one problem."""
