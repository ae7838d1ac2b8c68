"""Rules compared on identical drafts: rounds are recorded once, then every rule, γ and tree is scored without a model.

    python launch.py --config configs/replay.py --workdir runs/replay

Needs the models of a finished run, by default runs/quickstart. Cost: a minute on 2 CPU cores.

Expect: block over token from +0.03 tokens per target call at γ = 2 to +0.63 (0.45 to 0.81) at γ = 8; traversal over
multi-round rejection by 0.08 to 0.09 for one to four children; four children over one by 0.21 to 0.30.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.experiment = "replay"
    config.seed = 7
    config.models = "runs/quickstart"  # the workdir of a training run
    config.drafter = "distilled"
    config.prompts = 24
    config.prompt_length = 32
    config.new_tokens = 48
    config.draft_length = 8
    config.draft_lengths = (1, 2, 3, 4, 5, 6, 7, 8)
    config.chain_rules = ("token", "block", "lossy_fixed_acceptance")
    config.tree_shape = (4, 1, 1)  # 12 nodes
    config.children = (1, 2, 3, 4)
    config.tree_rules = ("multi_round", "traversal", "k_sequential")
    return config
