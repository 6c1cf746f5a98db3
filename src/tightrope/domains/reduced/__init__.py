"""A network on one box, reduced to its unstable neurons: what branch and bound works on.

`reduction.py` reduces, `splits.py` bounds subproblems in float32, `replay.py` makes proofs of them.
"""
