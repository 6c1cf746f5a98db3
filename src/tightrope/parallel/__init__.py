"""Tasks on engines: in this process, or in several on this machine."""

from tightrope.parallel.processes import run_in_processes as run_in_processes
from tightrope.parallel.task import Prepare as Prepare
from tightrope.parallel.task import Send as Send
from tightrope.parallel.task import Watcher as Watcher
from tightrope.parallel.task import Work as Work
from tightrope.parallel.task import run_here as run_here
