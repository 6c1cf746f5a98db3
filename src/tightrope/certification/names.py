"""The names of stages, for help texts, which must not import the stages themselves."""

# All but `milp`: exact up to its solver's tolerances only, it has to be asked for.
DEFAULT_STAGES = ("ibp", "attack", "crown-ibp", "alpha", "bab")
