"""Finding rules: terms enumerated over a set of operators, equal ones paired, generalised and proved."""
