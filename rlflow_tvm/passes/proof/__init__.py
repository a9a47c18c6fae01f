"""What rules are proved by: domains to evaluate terms over, the operators' meanings, samples of matches."""
