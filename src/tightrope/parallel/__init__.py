"""Tasks on engines: in this process, in several on this machine, or on a Ray cluster."""

from tightrope.parallel.engine import ENGINES as ENGINES
from tightrope.parallel.engine import choose_engine as choose_engine
from tightrope.parallel.engine import run_tasks as run_tasks
from tightrope.parallel.on_ray import RayCluster as RayCluster
from tightrope.parallel.processes import run_in_processes as run_in_processes
from tightrope.parallel.task import Prepare as Prepare
from tightrope.parallel.task import Send as Send
from tightrope.parallel.task import Shared as Shared
from tightrope.parallel.task import Watcher as Watcher
from tightrope.parallel.task import Work as Work
from tightrope.parallel.task import run_here as run_here
from tightrope.parallel.wishes import current_wishes as current_wishes
