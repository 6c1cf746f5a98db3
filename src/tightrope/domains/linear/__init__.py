"""Linear bounds: one backward pass over lines below and above each activation (CROWN).

`rules.py` has one rule per operation, `crown.py` puts them together, `alpha.py` chooses slopes.
"""
