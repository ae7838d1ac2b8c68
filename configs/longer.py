"""The main job with more training: a better target, and a drafter distilled for longer.

python launch.py --config configs/longer.py --workdir runs/longer
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.target_training.steps = 4000
    config.target_training.eval_every = config.target_training.save_every = 1000
    config.drafter_training.steps = 4000
    config.drafter_training.eval_every = config.drafter_training.save_every = 1000
    config.expected.bits_per_byte = 2.1
    config.expected.speedup_greedy = 1.8
    config.expected.speedup_sampled = 1.8
    return config
