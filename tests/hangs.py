"""How long tests wait for something that is certain to come."""

# Seconds until a test takes a process for hung. Everything takes a hundredth of it on a quiet
# machine; that a busy one is slow is no failure.
PATIENCE = 900.0
