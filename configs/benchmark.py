"""Where the time goes: width and batch curves, loop overhead, speed-up for every draft length.

    python launch.py --config configs/benchmark.py --workdir runs/benchmark

Needs the models of a finished run, by default runs/quickstart. Cost: 5 minutes on 2 CPU cores.

Expect (217 GFLOP/s): best draft lengths 6 and 12 at temperatures 0 and 1, 1.71 and 2.18 times target-only; a round 0.97
to 1.08 times the ideal one (once 1.13); measured over predicted speed-up 0.84 to 1.05; a tree of 16 nodes verified in
1.02 to 1.04 times a chain's time; γ = 0 at 1.01 times a minimal hand-written loop.

Checks outside their limits on a noisy machine are reported as failed, not repeated.
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
    config.tree_shape = (4, 1, 1, 1)  # 16 nodes, verified beside a chain of 16
    config.cache_lengths = (64, 190)
    config.repeats = 5
    config.loop_repeats = 25
    config.turns = 20
    return config
