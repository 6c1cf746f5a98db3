"""The `tightrope` command with a training method of one's own:

python examples/own_commands.py train --method hinge-ibp --out runs/mine
python examples/own_commands.py certify runs/mine --samples 100
"""

from own_objective import HingeIBP

from tightrope.cli import main
from tightrope.training.objectives import METHODS

METHODS[HingeIBP.name] = HingeIBP

if __name__ == "__main__":
    main()
