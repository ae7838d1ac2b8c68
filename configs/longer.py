"""The main job with more training: a better target, and a drafter distilled for longer.

    python launch.py --config configs/longer.py --workdir runs/longer
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.target_training.steps = 1500
    config.target_training.save_every = 250
    config.drafter_training.steps = 3000
    config.drafter_training.save_every = 500
    config.drafter_training.eval_every = 500
    config.expected.bits_per_byte = 2.1
    config.expected.speedup_greedy = 1.8
    config.expected.speedup_sampled = 1.8
    return config
