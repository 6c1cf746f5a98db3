"""Bounds of subproblems in which some activations see a part of their interval only.

That works for an activation of any kind: `subproblems.py` says what a subproblem is, `bounder.py`
bounds subproblems in float32, proves the bounds in float64, and says where to cut next.
"""
