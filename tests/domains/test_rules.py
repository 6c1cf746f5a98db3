"""Every operation has a rule in every domain, or the domain says by name that it has none."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tightrope.domains import interval, zonotope
from tightrope.domains.linear import magnitudes, relaxations, rules
from tightrope.domains.milp import expressions
from tightrope.domains.reduced import reduction
from tightrope.graph import evaluate, ops

EVERY = set(ops.ALL_OPS) - {ops.Input}
TABLES: dict[str, Collection[type[ops.Op]]] = {
    "points": evaluate.TABLE,
    "interval": interval.RULES,
    "zonotope": zonotope.RULES,
    "linear": rules.RULES,
    "magnitudes": magnitudes.RULES,
    "programs": [*expressions.RULES, *expressions.ENCODED, *expressions.NOT_PIECEWISE_LINEAR],
}


@pytest.mark.parametrize("domain", TABLES)
def test_no_rule_is_missing(domain: str) -> None:
    assert len(TABLES[domain]) == len(set(TABLES[domain]))
    assert set(TABLES[domain]) == EVERY


@pytest.mark.parametrize("domain", [zonotope, rules], ids=["zonotope", "linear"])
def test_intervals_do_only_where_a_domain_says_so(domain: object) -> None:
    table, by_intervals = vars(domain)["RULES"], vars(domain)["by_intervals"]
    without = {op for op, rule in table.items() if rule is by_intervals}
    assert without == set(vars(domain)["BY_INTERVALS"])


def test_what_can_be_reduced_is_listed() -> None:
    """Lines of other activations than ReLU's would be taken for its own."""
    assert set(reduction.LINEAR) & set(relaxations.RULES) == set()
    assert set(reduction.LINEAR) == {ops.Input, *expressions.RULES}
