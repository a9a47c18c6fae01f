"""RLFlow's world model: V sees a graph, M foresees what a rewrite makes of it, a controller learns in what M dreams."""
