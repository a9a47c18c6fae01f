"""X-RLflow's agent: it chooses among the graphs that are one rewrite away."""
