"""Where the time goes: width and batch curves, loop overhead, speed-up for every draft length.

python launch.py --config configs/benchmark.py --workdir runs/benchmark
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "benchmark"
    config.seed = 3
    config.models = "runs/quickstart"  # the workdir of a training run
    config.drafter = "distilled"
    config.prompts = 4
    config.prompt_length = 32
    config.new_tokens = 96
    config.batches = (1, 4, 16)
    config.widths = (1, 2, 4, 8, 16, 32)
    config.draft_lengths = (1, 2, 4, 6, 8, 10, 12, 16)
    config.repeats = 5
    config.loop_repeats = 25
    config.turns = 20
    return config
