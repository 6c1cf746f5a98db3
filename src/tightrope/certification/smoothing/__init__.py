"""Randomised smoothing (Cohen et al. 2019): certificates that hold with high probability.

They are about another function than the network, its majority vote under Gaussian noise, and they
may be wrong with a chosen probability. So nothing here is a `Verdict`, and nothing of it stands in
a table beside proofs.
"""
