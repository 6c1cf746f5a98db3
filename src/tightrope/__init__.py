"""Tightrope: train, attack and certify neural networks that are provably robust.

    import tightrope as tr

    run = tr.train(data="mnist", net="cnn3", method=tr.IBP(), eps=0.1, out="runs/a")
    print(tr.certify(run, samples=1000))

Every command of the command line has a function of the same name here.
"""

from tightrope.api import AttackResult, attack, certify, export, train
from tightrope.attacks import pgd
from tightrope.box import Box
from tightrope.certification import Certification, Verdict
from tightrope.errors import UserError
from tightrope.graph import Graph, trace
from tightrope.runs import Run
from tightrope.training.objectives import IBP, PGD, Loss, Objective, Standard
from tightrope.version import __version__

__all__ = [
    "IBP",
    "PGD",
    "AttackResult",
    "Box",
    "Certification",
    "Graph",
    "Loss",
    "Objective",
    "Run",
    "Standard",
    "UserError",
    "Verdict",
    "__version__",
    "attack",
    "certify",
    "export",
    "pgd",
    "trace",
    "train",
]
