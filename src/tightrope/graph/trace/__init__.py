"""From a module to a graph: what torch.export recorded, operator by operator."""
