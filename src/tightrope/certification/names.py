"""The names of stages, for help texts, which must not import the stages themselves."""

# All but `milp`: exact up to its solver's tolerances only, it has to be asked for.
DEFAULT_STAGES = ("ibp", "quick", "crown-ibp", "crown", "attack", "alpha", "bab")

# Of networks of distance layers, on which linear bounds are intervals and nothing can be split.
DISTANCE_STAGES = ("lipschitz", "ibp", "quick", "attack")

# What `tightrope attack` attacks with.
SUITES = ("pgd", "autoattack")

# What a search may take apart, whether it uses multi-neuron constraints, and the rules by which it
# chooses a neuron to split.
SPLITS = ("auto", "input", "relu")
CUTS = ("auto", "off", "on")
BRANCHING = ("intercept", "babsr", "kfsb")
