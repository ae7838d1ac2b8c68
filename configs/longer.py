"""The main job with more training: a better target, and a drafter that has seen more of its greedy texts.

    python launch.py --config configs/longer.py --workdir runs/longer
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    for training in (config.target_training, config.drafter_training):
        training.steps = 4000
        training.eval_every = training.save_every = 1000
    config.distillation.target_samples = 0.15
    config.expected.bits_per_byte = 2.1
    config.expected.speedup_greedy = 1.8
    config.expected.speedup_sampled = 1.8
    return config
