"""Bounds of subproblems on the network itself: for networks too large to be reduced.

`subproblems.py` says what a subproblem is, `rule.py` how coefficients go through its activations,
`bounder.py` bounds subproblems in float32 and makes proofs of the bounds in float64.
"""
