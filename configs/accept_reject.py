"""The accept/reject rule on four drafted tokens, 1,000 trials: what each position's acceptance rate means.

    python launch.py --config configs/accept_reject.py --workdir runs/accept_reject

Cost: about 10 seconds on 2 CPU cores.
Expect: conditional on reaching it, each position accepts with probability min(1, p/q) = 1, 1, 0.333, 0.2; counted over
all trials, a position is kept with their running product 1, 1, 0.333, 0.067. A round emits 3.4 tokens on average.
"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.experiment = "accept_reject"
    config.seed = 42
    config.trials = 1000
    config.draft_tokens = (15, 23, 8, 42)
    config.draft_probabilities = (0.8, 0.7, 0.6, 0.5)  # q(token) at each position
    config.target_probabilities = (0.9, 0.8, 0.2, 0.1)  # p(token) at each position
    return config
