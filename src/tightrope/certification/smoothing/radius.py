"""How large a radius the votes of noisy copies speak for.

If class c wins under `N(x, sigma^2 I)` with probability at least p > 1/2, then it wins around every
point within `sigma Phi^-1(p)` of x, in the l2 norm (Cohen et al. 2019, Theorem 1). Of n votes k are
for c; p is Clopper's and Pearson's lower limit, which lies above the truth with probability at most
`alpha`, whatever the truth is.
"""

from __future__ import annotations

from statistics import NormalDist

from scipy.special import betaincinv
from scipy.stats import binom

# Limits and radii are taken down by more than what is rounded in them.
LESS = 1e-9

NORMAL = NormalDist()


def lowest_share(votes: int, draws: int, alpha: float) -> float:
    """Return Clopper's and Pearson's lower limit of a probability, one-sided."""
    if votes == 0:
        return 0.0
    limit = float(betaincinv(votes, draws - votes + 1, alpha)) * (1 - LESS)
    # By definition: so many votes or more are at most that likely. The inverse may be off.
    while limit > 0 and float(binom.sf(votes - 1, draws, limit)) > alpha:
        limit *= 1 - LESS
    return limit


def certified_radius(votes: int, draws: int, sigma: float, alpha: float) -> float | None:
    """Return the l2 radius that the votes for a class speak for; None: too few of them."""
    share = lowest_share(votes, draws, alpha)
    if not share > 0.5:
        return None
    return max(0.0, sigma * NORMAL.inv_cdf(min(share, 1 - 2**-53)) * (1 - LESS))


def largest_radius(draws: int, sigma: float, alpha: float) -> float:
    """Return the radius if all votes agree: more than that no draws of this number can say."""
    return certified_radius(draws, draws, sigma, alpha) or 0.0
