"""Tokens per target call against the acceptance rate, in closed form, with measured points laid over.

    python launch.py --config configs/theory_curves.py --workdir runs/curves
    python launch.py --config configs/theory_curves.py --workdir runs/curves --config.measured=runs/mine/report.json

Cost: about 5 seconds on 2 CPU cores.
Expect: α = 0.9, γ = 4: 4.095 tokens per target call with the bonus token and 3.439 without; α = 0.3, γ = 4: 1.425 and
1.417. Measured points lie near the curve of their γ, not on it: their α differs by depth and position.
"""

import ml_collections
from ml_collections import config_dict


def get_config():
    config = ml_collections.ConfigDict()
    config.experiment = "theory_curves"
    config.draft_lengths = (2, 4, 6, 8)
    config.alpha_range = (0.1, 0.99)
    config.num_alphas = 50
    config.table_alphas = (0.3, 0.5, 0.7, 0.8, 0.9)
    config.cost_ratio = 0.1  # a draft step's share of a target step, for the table of speed-ups
    config.long_draft_lengths = (4, 8, 32, 64)
    config.measured = config_dict.placeholder(str)  # a report.json with decoding rows
    return config
