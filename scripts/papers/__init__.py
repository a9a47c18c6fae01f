"""The papers' tables and figures, made from what the other scripts have left; `scripts/paper.py` is the command."""
