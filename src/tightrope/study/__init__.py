"""Studies: presets and, on top of them, the tables and figures of the paper."""
